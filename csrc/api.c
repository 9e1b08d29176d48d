/* Floor 7: the rest of sl_api.h. Most of its functions are implemented where they belong; here is what belongs to
 * the boundary itself. */
#include <stdlib.h>

#include "safeload.h"

void sl_free(void *memory) { free(memory); }
