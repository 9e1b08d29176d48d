/* Reads past the page cache: ranges of a file by way of a room of whole pages, or straight to where they belong. */
#ifndef SL_DIRECT_H
#define SL_DIRECT_H

#include "jobs/job.h"

/* Whether a job's chunks are consecutive bytes of a file that is open for such reads too. */
bool sl_direct_can(const sl_job *job);

/* Reads `size` bytes, at most those of a chunk, from `begin` on of a job's source; `*bytes` is in `room`. What cannot
 * be read so is read through the page cache, which also finds the errors. */
int32_t sl_direct_read(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *room, const uint8_t **bytes,
                       sl_error *error);

/* The same into `memory`: without a copy where pages of the file are pages there. */
int32_t sl_direct_copy(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *room, uint8_t *memory,
                       sl_error *error);

#endif
