/* Floor 6: jobs. A job is a source (a range of a file, or memory) and a destination in memory, with what to do on the
 * way; or memory to be written. sl_jobs_run (sl_api.h) cuts all jobs into chunks that the threads share. */
#ifndef SL_JOB_H
#define SL_JOB_H

#include "kernels/quant.h"
#include "platform/parallel.h"

/* Bytes in a chunk: large enough that a system call, a counter and a clock are noise (3 MiB take about 1 ms), small
 * enough that threads end together and a slice of 50 ms keeps its time even on a disk of 200 MB/s. A multiple of 3, so
 * that chunks of 6-bit elements are whole blocks of 4. */
#define SL_CHUNK ((uint64_t)3 << 20)

/* A file that is not in the page cache is read by the same plain loop: two threads keep two reads of 3 MiB in flight, and
 * the kernel's readahead does the rest. 2.5 GiB on a virtual disk (ext4, Linux 6.18, read_ahead_kb 8192 and 128), medians
 * of 5 to 8 shuffled rounds of four series, GiB/s: plain 1.2 1.9, 1.2 2.1; WILLNEED for the whole file first 1.5 2.3, 1.7 2.6;
 * WILLNEED in windows of 64 MiB 1.5, 1.1; readahead(2) 24 MiB ahead 1.7, 1.5; one thread 0.9 1.0, 1.1; fio's best direct
 * read 1.6 1.7, 1.2 1.3. The disk itself varies from 0.9 to 3.3 from one sample to the next. WILLNEED for a whole file is the
 * only one that might help, and it is one call of seconds that no signal interrupts and that evicts what else is cached. */

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
    sl_conversion conversion; /* of an SL_READ between different dtypes; from or to f32 where values are scaled */
    int32_t tier;
} sl_cut;

/* Where a job's source begins when it is memory. */
static inline const uint8_t *sl_job_memory(const sl_job *job) { return (const uint8_t *)(uintptr_t)job->offset; }

/* Where the bytes [begin, begin + size) of a job's source are: memory as it is, a file's in `passage`. */
int32_t sl_job_fetch(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *passage, const uint8_t **source,
                     sl_error *error);

/* What only looks at values or scales them (job_values.c): the targets SL_ABSMAX and SL_FINITE, and sl_channels. */
bool sl_values_wanted(const sl_job *job);
int32_t sl_values_cut(const sl_job *job, sl_cut *cut, sl_error *error);
int32_t sl_values_run(const sl_job *job, const sl_cut *cut, uint64_t begin, uint64_t size, uint8_t *scratch, sl_error *error);

/* `count` f32, in the byte order of files, of the int8 at `codes`, of which the first is element `element` of a job with
 * sl_channels. */
void sl_values_restore(const sl_job *job, const sl_quant *kernels, const uint8_t *codes, uint64_t element, uint64_t count,
                       void *values);

/* Fails for the first f32 (in the byte order of files) that is not finite of `count`, of which the first is element `index` of the job; SL_OK when
 * there is none. */
int32_t sl_values_refuse(const void *values, uint64_t count, uint64_t index, sl_error *error);

/* Statistics (job_stats.c): the targets SL_STATS and SL_STATS_HISTOGRAM. */
bool sl_stats_wanted(const sl_job *job);
int32_t sl_stats_cut(const sl_job *job, sl_cut *cut, sl_error *error);
int32_t sl_stats_run(const sl_job *job, const sl_cut *cut, uint64_t begin, uint64_t size, uint8_t *scratch, sl_error *error);

/* Grids (job_grid.c). SL_E_ARGUMENT when the job cannot be one. */
int32_t sl_grid_cut(const sl_job *job, sl_cut *cut, sl_error *error);
int32_t sl_grid_run(const sl_job *job, const sl_cut *cut, uint64_t chunk, uint8_t *scratch, sl_error *error);

#endif
