/* Floor 6: jobs. A job is a range of a file and a range of memory of the same size; sl_jobs_run (sl_api.h) moves the
 * bytes of all jobs, cut into chunks that the threads share. */
#ifndef SL_JOB_H
#define SL_JOB_H

#include "parallel.h"

/* Bytes in a chunk: large enough that a system call, a counter and a clock are noise (4 MiB take about 1 ms), small
 * enough that threads end together and a slice of 50 ms keeps its time even on a disk of 200 MB/s. */
#define SL_CHUNK ((uint64_t)4 << 20)

#endif
