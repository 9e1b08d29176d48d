/* The C core's public header: a guard and standard types around sl_api.h. */
#ifndef SAFELOAD_H
#define SAFELOAD_H

#include <stddef.h>
#include <stdint.h>

#include "sl_api.h"

#endif
