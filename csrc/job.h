/* Floor 6: jobs. A job is a source (a range of a file, or memory) and a destination in memory, with what to do on the
 * way; or memory to be written. sl_jobs_run (sl_api.h) cuts all jobs into chunks that the threads share. */
#ifndef SL_JOB_H
#define SL_JOB_H

#include "kernel.h"
#include "parallel.h"

/* Bytes in a chunk: large enough that a system call, a counter and a clock are noise (3 MiB take about 1 ms), small
 * enough that threads end together and a slice of 50 ms keeps its time even on a disk of 200 MB/s. A multiple of 3, so
 * that chunks of 6-bit elements are whole blocks of 4. */
#define SL_CHUNK ((uint64_t)3 << 20)

/* Bytes in a chunk that is written, which starts and ends at a multiple of it in the file: the page cache takes memory in
 * large runs only for large aligned writes. With chunks of 3 MiB that were not aligned, saving 1 GiB took 0.3 to 0.9 s
 * instead of 0.2. */
#define SL_WRITE_CHUNK ((uint64_t)16 << 20)

/* Bytes of a file on their way through a conversion: they are read and converted while they are in the second-level
 * cache, so that memory sees only the result. Likewise a multiple of 3. */
#define SL_PASSAGE ((uint64_t)192 << 10)

/* How a job is cut, worked out once. */
typedef struct sl_cut {
    uint64_t chunks;
    uint64_t step;          /* bytes of a chunk (of a whole grid chunk: about) */
    uint64_t shortfall;     /* bytes by which the first chunk is shorter */
    uint64_t rows, columns; /* of a grid's chunk */
    uint64_t scratch;       /* bytes that each thread needs */
    sl_conversion conversion; /* of an SL_READ between different dtypes */
} sl_cut;

/* Where a job's source begins when it is memory. */
static inline const uint8_t *sl_job_memory(const sl_job *job) { return (const uint8_t *)(uintptr_t)job->offset; }

/* Grids (job_grid.c). SL_E_ARGUMENT when the job cannot be one. */
int32_t sl_grid_cut(const sl_job *job, sl_cut *cut, sl_error *error);
int32_t sl_grid_run(const sl_job *job, const sl_cut *cut, uint64_t chunk, uint8_t *scratch, sl_error *error);

#endif
