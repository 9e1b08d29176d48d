/* Reads past the page cache: ranges of a file through a room of whole pages, or directly to their destination. */
#ifndef SL_DIRECT_H
#define SL_DIRECT_H

#include "jobs/job.h"

/* Whether a job's chunks are consecutive bytes of a file that is also open for direct reads. */
bool sl_direct_can(const sl_job *job);

/* Reads at most a chunk of `size` bytes from `begin` in a job's source; `*bytes` points into `room`. Falls back to the
 * page cache if the direct read fails, which also finds the error. */
int32_t sl_direct_read(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *room, const uint8_t **bytes,
                       sl_error *error);

/* Like sl_direct_read, but into `memory`: without a copy if pages of the file are pages there. */
int32_t sl_direct_copy(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *room, uint8_t *memory,
                       sl_error *error);

#endif
