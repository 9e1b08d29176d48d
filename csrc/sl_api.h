/* All declarations that Python sees. This file is read twice, by the C compiler through safeload.h and by cffi as its
 * cdef, so that the two cannot diverge. Hence it has no guard, no directives except integer #defines, and only
 * declarations.
 *
 * Conventions: A function that can fail returns SL_OK or another status, and fills `error` on failure; outputs are then
 * untouched. Sizes and offsets are in bytes unless stated otherwise. Finished objects are immutable, so any thread may
 * read them.
 */

/* Status of a call. Each maps to a Python exception in safeload/core/native.py. */
#define SL_OK 0
#define SL_E_FORMAT 1      /* the bytes break their format: FormatError */
#define SL_E_LIMIT 2       /* exceeds one of our named limits: LimitError */
#define SL_E_TRUNCATED 3   /* the file ended before the requested bytes: FormatError */
#define SL_E_OS 4          /* a system call failed with os_errno: OSError */
#define SL_E_MEMORY 5      /* MemoryError */
#define SL_E_ARGUMENT 6    /* a mistake of the caller, not of the file: SafeloadError */
#define SL_E_RANGE 7       /* a value does not fit into the target; position is the element's index: RangeError */
#define SL_E_UNSUPPORTED 8 /* well-formed, but not supported here: UnsupportedError */

/* Enough for a clipped tensor name, a shape of SL_MAX_RANK small dims, and the numbers around them. */
#define SL_MESSAGE_SIZE 1024

typedef struct sl_error {
    int32_t status;
    int32_t os_errno;              /* errno for SL_E_OS, else 0 */
    int64_t position;              /* byte of the fault in the file (or buffer), or -1 */
    char message[SL_MESSAGE_SIZE]; /* UTF-8, NUL-terminated */
} sl_error;

/* ---- dtypes: one table for all formats (kernels/dtype.c) ---- */

/* Indices into the table. The dtypes of safetensors come first, in the order of its Dtype enum, which determines the
 * order of tensors in a written file: https://github.com/safetensors/safetensors/blob/main/safetensors/src/tensor.rs */
#define SL_BOOL 0
#define SL_F4 1
#define SL_F6_E2M3 2
#define SL_F6_E3M2 3
#define SL_U8 4
#define SL_I8 5
#define SL_F8_E5M2 6
#define SL_F8_E4M3 7
#define SL_F8_E8M0 8
#define SL_F8_E4M3FNUZ 9
#define SL_F8_E5M2FNUZ 10
#define SL_I16 11
#define SL_U16 12
#define SL_F16 13
#define SL_BF16 14
#define SL_I32 15
#define SL_U32 16
#define SL_F32 17
#define SL_C64 18
#define SL_F64 19
#define SL_I64 20
#define SL_U64 21
#define SL_SAFETENSORS_COUNT 22 /* number of dtypes that safetensors has */
#define SL_C128 22
#define SL_DTYPE_COUNT 23 /* number of element types; their numbers have no gaps */

/* GGUF's block types: SL_GGML plus the number in enum ggml_type, with gaps. A row is a sequence of blocks, and the
 * elements of a block share scales: https://github.com/ggml-org/ggml/blob/master/include/ggml.h */
#define SL_GGML 64
#define SL_Q4_0 66
#define SL_Q4_1 67
#define SL_Q5_0 70
#define SL_Q5_1 71
#define SL_Q8_0 72
#define SL_Q8_1 73
#define SL_Q2_K 74
#define SL_Q3_K 75
#define SL_Q4_K 76
#define SL_Q5_K 77
#define SL_Q6_K 78
#define SL_Q8_K 79
#define SL_IQ2_XXS 80
#define SL_IQ2_XS 81
#define SL_IQ3_XXS 82
#define SL_IQ1_S 83
#define SL_IQ4_NL 84
#define SL_IQ3_S 85
#define SL_IQ2_S 86
#define SL_IQ4_XS 87
#define SL_IQ1_M 93
#define SL_TQ1_0 98
#define SL_TQ2_0 99
#define SL_MXFP4 103
#define SL_NVFP4 104
#define SL_Q1_0 105
#define SL_Q2_0 106
#define SL_DTYPE_LIMIT 107 /* above all numbers */

/* Only a conversion target: Q4_0 with scale absmax / 7; SL_Q4_0 uses ggml's signed maximum / -8. */
#define SL_Q4_0_ABSMAX 63

/* Only a conversion target: f32 rounded to odd. An inexact result is the odd one of the two nearest floats, so that
 * rounding again, to a type with at most 22 bits of precision, equals a single rounding of the source. */
#define SL_F32_ODD 61

/* Only a source of packed codes: the ternary codes of I2_S, with a single scale behind all blocks in GGUF files. */
#define SL_I2_S 62

/* Bytes of a ggml type unknown to this version; they are never read as numbers. */
#define SL_UNKNOWN 60

/* Kinds of elements. */
#define SL_KIND_FLOAT 0
#define SL_KIND_INT 1
#define SL_KIND_BOOL 2
#define SL_KIND_COMPLEX 3
#define SL_KIND_BLOCKS 4

typedef struct sl_dtype_info {
    const char *code; /* the spelling of safetensors or ggml: "BF16", "Q4_0" */
    const char *name; /* the spelling of numpy, ml_dtypes, torch and ggml: "bfloat16", "q4_0" */
    int32_t kind;     /* SL_KIND_FLOAT .. */
    int32_t bits;     /* per element; 0 for block types */
    int32_t block;    /* smallest number of elements that fills whole bytes */
    int32_t block_bytes;
    int32_t swap;        /* bytes to reverse in a byte swap: half of a complex number; 1 if there is nothing to swap */
    int32_t ggml;        /* number in enum ggml_type, or -1 */
    int32_t scale_at;    /* offset of the f16 scales in a block */
    int32_t scale_count; /* number of f16 scales; 0 if scales have another type or are scattered (IQ1_M) */
} sl_dtype_info;

const sl_dtype_info *sl_dtype_get(int32_t dtype); /* NULL for an unknown number */

const char *sl_compiler(void); /* the compiler of this build, with its version */

/* ---- kernels (kernels/convert.c) ---- */

/* Instruction sets. Every tier produces the same bits as scalar C. */
#define SL_TIER_SCALAR 0
#define SL_TIER_AVX2 1
#define SL_TIER_AVX512 2
#define SL_TIER_NEON 3
#define SL_TIER_COUNT 4

const char *sl_tier_name(int32_t tier);           /* "avx2"; NULL if out of range */
int32_t sl_tier_available(int32_t tier);          /* whether this processor and this build support it */
int32_t sl_convertible(int32_t from, int32_t to); /* whether sl_convert and sl_jobs_run support the conversion */

/* Converts `count` elements in memory, which must be whole blocks of both dtypes. Both sides are little-endian; the
 * source may have any alignment. SL_E_ARGUMENT for an unknown conversion or tier. */
int32_t sl_convert(int32_t tier, int32_t from, int32_t to, const void *source, void *destination, uint64_t count);

/* ---- quantization kernels (kernels/quant.c) ---- */

/* Quantizes rows of `columns` f32 (little-endian) to blocks of `to` with importance for each column, like ggml with an
 * importance matrix. Values must be finite. SL_E_ARGUMENT if `to` has no such kernel, or rows are not whole blocks. */
int32_t sl_quantize_weighted(int32_t tier, int32_t to, const void *source, const float *importance, void *blocks,
                             uint64_t rows, uint64_t columns);

/* Index of the first of `count` blocks with an f16 scale that is NaN or infinite (SL_MXFP4: a NaN exponent; SL_NVFP4:
 * scales that are not numbers), or `count`. The quantizers write such a scale if and only if the source has NaN or
 * infinity, or the block's scale does not fit into f16. */
uint64_t sl_blocks_finite(int32_t dtype, const void *blocks, uint64_t count);

/* The f32 bits of the largest |x|; infinity or NaN if any x is. `from` is SL_F32, SL_BF16 or SL_F16, little-endian at
 * any alignment. SL_E_ARGUMENT for another `from` or an unknown tier. */
int32_t sl_absmax(int32_t tier, int32_t from, const void *source, uint64_t count, uint32_t *bits);
/* Raises bits[i] to the bits of |source[i]|. */
int32_t sl_absmax_each(int32_t tier, const void *source, uint32_t *bits, uint64_t count);

/* x * factor, rounded half away from zero and clamped to [-128, 127]; NaN becomes 127. `each`: element i uses
 * factors[i]; otherwise all elements use factors[0]. */
int32_t sl_to_int8(int32_t tier, const void *source, int8_t *destination, uint64_t count, const float *factors,
                   int32_t each);

/* ---- codes of other engines (kernels/encode.c) ---- */

/* How scales and codes are computed, exactly as by the engine's own tool. */
#define SL_ENCODE_INT 0         /* compressed-tensors: absmax is half of the range of the codes */
#define SL_ENCODE_INT_ZERO 1    /* compressed-tensors: with zero points */
#define SL_ENCODE_FP8 2         /* compressed-tensors: absmax / 448 */
#define SL_ENCODE_FP8_INVERSE 3 /* transformers: 1 / (1 / absmax * 448) */
#define SL_ENCODE_NVFP4 4       /* compressed-tensors: E4M3 scales under a scale of the tensor */
#define SL_ENCODE_MXFP4 5       /* compressed-tensors */
#define SL_ENCODE_MLX 6         /* MLX: affine */
#define SL_ENCODE_MLX_MXFP4 7
#define SL_ENCODE_MLX_NVFP4 8
#define SL_ENCODE_MLX_MXFP8 9
#define SL_ENCODE_TABLE 10 /* bitsandbytes: codes of the numbers in a table */
#define SL_ENCODE_MXFP8 11 /* compressed-tensors */

/* A matrix to quantize, in file byte order, and its parts, in this machine's. */
typedef struct sl_encoding {
    int32_t method;     /* SL_ENCODE_INT .. */
    int32_t from;       /* SL_F32, SL_BF16 or SL_F16 */
    int32_t bits;       /* per code */
    int32_t is_signed;  /* INT: codes are two's complement, without an offset */
    int32_t high_first; /* the high bits of a byte hold the first code */
    int32_t filler;     /* the code after an odd number of codes */
    uint64_t rows, columns;
    uint64_t row_block, group; /* rows and columns of a block; the last block may be smaller */
    uint64_t row_bytes;        /* between the rows of codes */
    float global;              /* NVFP4: the scale of the tensor */
    const float *table;        /* TABLE: 16 numbers */
    const void *weights;
    /* Codes, and an element for each block; NULL to skip. */
    uint8_t *codes;
    float *scales, *biases;
    int8_t *zeros;
    uint8_t *scale_codes; /* E4M3 or exponents */
} sl_encoding;

/* SL_E_RANGE if a value or a scale is not finite: *position is the index of the value, or of the first of its block.
 * SL_E_ARGUMENT for an unknown dtype or tier; codes of other than 2, 3, 4, 5, 6 or 8 bits; blocks within a row that
 * have fewer than 16 columns, or no multiple of 8; rows of 2, 3, 5 or 6 bits that are no multiple of 8. */
int32_t sl_encode(int32_t tier, const sl_encoding *encoding, uint64_t *position);

/* ---- differences (kernels/difference.c) ---- */

/* Differences between two runs of numbers. Pairs with NaN or infinity are excluded from all sums. */
typedef struct sl_difference {
    double largest; /* |a - b| */
    uint64_t at;    /* first index of the largest difference; 0 if all pairs are equal */
    double squares; /* sum of (a - b)^2 */
    double dot, norm_a, norm_b;
    uint64_t unequal;   /* pairs that differ; two NaNs are equal */
    uint64_t nonfinite; /* unequal pairs with NaN or infinity */
    uint64_t finite;    /* pairs without NaN or infinity */
} sl_difference;

/* Compares `number` consecutive tensors in `a` and `b`; tensor k has counts[k] elements, SL_F32 or SL_F64, aligned and
 * in this machine's byte order. f32 is compared as f64. Every tier produces the same bits. SL_E_ARGUMENT for another
 * dtype or an unknown tier. */
int32_t sl_differ(int32_t tier, int32_t dtype, const void *a, const void *b, const uint64_t *counts, uint64_t number,
                  sl_difference *found);

/* ---- statistics (kernels/stats.c, jobs/op_stats.c) ---- */

/* Statistics of consecutive elements of a tensor, with the same bits for any instruction set and number of threads. The
 * mean of the finite elements is (mean + rest) * 2^exponent, their variance squares / finite * 4^exponent. */
typedef struct sl_stats {
    uint64_t finite;                    /* number of finite elements */
    uint64_t nan, infinite;             /* numbers of NaN and infinite elements */
    uint64_t zeros;                     /* of either sign */
    uint64_t first_nan, first_infinite; /* index in the tensor, or 2^64-1 */
    double min, max;                    /* of finite elements, exact, never -0; min > max if there are none */
    double mean, rest;
    double squares;   /* sum of squared differences from the mean */
    int64_t exponent; /* 0 except for f64 of extreme magnitude */
    /* For integers, exact: smallest and largest, with the highest bit flipped unless the dtype is SL_U64, and the sum
     * sum_high * 2^64 + sum_low. */
    uint64_t least, most, sum_low;
    int64_t sum_high;
} sl_stats;

/* SL_OP_STATS writes an sl_stats for each segment of this many elements; the last segment may be shorter. 2^18 elements
 * are 2 MiB of f64, so that a chunk holds at least one segment of any dtype. */
#define SL_STATS_SEGMENT 262144

/* Bin i counts finite elements with 2^(SL_HISTOGRAM_LOWEST + i) <= |x| < 2^(SL_HISTOGRAM_LOWEST + i + 1). The first bin
 * also counts smaller non-zero elements, and the last bin larger elements. 2^-48 to 2^16 covers all of f16, and weights
 * of other dtypes in practice. */
#define SL_HISTOGRAM_BINS 64
#define SL_HISTOGRAM_LOWEST -48

/* For each of `count` tensors, merges the counts[i] consecutive segments at parts[i] into merged[i]. */
void sl_stats_merge(const sl_stats *const *parts, const uint64_t *counts, uint64_t count, sl_stats *merged);

/* ---- tables: names, dtypes, shapes and byte ranges of a file (formats/table.c) ---- */

/* numpy 2 allows 64 dims (NPY_MAXDIMS); no array can have more. */
#define SL_MAX_RANK 64

typedef struct sl_table sl_table;

/* A table as columns of `count` entries, in the order of the bytes in the file. Owned by the table. */
typedef struct sl_columns {
    uint64_t count;
    const char *names; /* UTF-8, with '\n' after each name, including the last */
    uint64_t names_size;
    const uint64_t *name_ends; /* names[i] is [name_ends[i - 1] + 1, name_ends[i]); the first begins at 0 */
    const uint8_t *dtypes;     /* SL_BOOL .. */
    const uint64_t *dims;      /* all shapes, one after another, outermost dim first */
    const uint64_t *dim_ends;  /* shape i is dims[dim_ends[i - 1] .. dim_ends[i]) */
    const uint64_t *begins;    /* byte range in the file: [begins[i], ends[i]) */
    const uint64_t *ends;
    int32_t names_ascend;          /* whether the names are sorted by their bytes */
    int32_t newline_in_names;      /* whether a name contains '\n', so that names must be split by name_ends */
    int32_t plain;                 /* whether the bytes of every tensor are its array: at least one element, in whole
                                      bytes, beginning at a multiple of the alignment */
    int32_t has_metadata;          /* 0 if the file has none (or null) */
    uint64_t metadata_count;       /* number of pairs */
    const char *metadata_text;     /* UTF-8: key, value, key, value, ... in file order */
    const uint64_t *metadata_ends; /* 2 * metadata_count exclusive ends */
    uint64_t metadata_size;
    int32_t keeps_order; /* only for sl_safetensors_header: whether the bytes have the order of the columns */
} sl_columns;

/* A table begins with its columns, at the same address. */
const sl_columns *sl_table_columns(const sl_table *table);
int64_t sl_table_find(const sl_table *table, const char *name, uint64_t name_size); /* index or -1 */
void sl_table_free(sl_table *table);                                                /* NULL: nothing */

/* Makes an object of each name and puts it into a list, with functions of the caller: void *make(const char *,
 * ptrdiff_t), which returns NULL if it fails, and int put(void *list, ptrdiff_t place, void *object), which returns 0
 * or fails. Stops at a failure. With `sorted`, the names are put in ascending order if the table knows it. Returns
 * whether they ascend. */
int32_t sl_table_list_names(const sl_table *table, int32_t sorted, void *make, void *put, void *list);

/* Functions of the caller that make objects and take them over, with the signatures of Python's functions. */
typedef struct sl_makers {
    void *new_number; /* void *(unsigned long long): PyLong_FromUnsignedLongLong */
    void *new_tuple;  /* void *(ptrdiff_t size): PyTuple_New */
    void *fill_tuple; /* int (void *tuple, ptrdiff_t place, void *object), 0 or a failure: PyTuple_SetItem */
    void *fill_list;  /* the same for a list: PyList_SetItem */
    void *keep;       /* void (void *object), before it goes into one more place: Py_IncRef */
} sl_makers;

/* Puts a tuple of each tensor into a list: number of the dtype, tuple of the dims, first byte and one past the last.
 * Returns 0 at the first failure of a function, else 1. */
int32_t sl_table_list_entries(const sl_table *table, const sl_makers *makers, void *list);

/* Like sl_table_list_entries, for the dims of the tensors [begin, end) alone. Equal dims share a tuple, except that one
 * between many others can get a new one. */
int32_t sl_table_list_shapes(const sl_table *table, uint64_t begin, uint64_t end, const sl_makers *makers, void *list);

/* ---- memory and files (platform/posix.c, platform/windows.c) ---- */

/* Zeroed memory for a large buffer that is filled once; size > 0. Uses huge pages if the system has them, because
 * faults of small pages cost more than filling the bytes. NULL if out of memory. */
void *sl_memory_alloc(uint64_t size);
void sl_memory_free(void *memory, uint64_t size);

/* An open file, and its identity at that moment, to compare when it is opened again. */
typedef struct sl_file {
    int64_t handle; /* a descriptor on POSIX, a HANDLE on Windows: the `file` of the functions below */
    uint64_t size;
    int64_t mtime_ns;       /* since 1970, like Python's os.stat */
    uint64_t device, inode; /* 0 on Windows, where Python's os.stat knows more digits than the handle provides */
} sl_file;

/* Opens a regular file for reading; refuses any other kind. On failure *opened is untouched. */
int32_t sl_file_open(const char *path_utf8, sl_file *opened, sl_error *error);
void sl_file_close(int64_t file);

/* Reads exactly `size` bytes at `offset`. If there are fewer, SL_E_TRUNCATED with the offset of the file's end.
 * Continues after interrupted and short reads. `error` may be NULL. */
int32_t sl_file_read(int64_t file, uint64_t offset, void *memory, uint64_t size, sl_error *error);

/* Writes exactly `size` bytes at `offset`. For long writes, jobs return to the caller in between. */
int32_t sl_file_write(int64_t file, uint64_t offset, const void *memory, uint64_t size, sl_error *error);

/* Opens the same file again for reads past the page cache (O_DIRECT). Returns 0 if the system or the file system does
 * not support it, which is not a failure. Close it with sl_file_close. */
int64_t sl_file_open_direct(int64_t file);

/* Maps [0, size): privately and copy-on-write, or read-only, which limits of memory do not count; size > 0. */
int32_t sl_file_map(int64_t file, uint64_t size, int32_t writable, void **address, sl_error *error);
void sl_file_unmap(void *address, uint64_t size);

/* Reserves disk space for [0, size), so that a full disk is detected before the first byte is written. Returns SL_OK if
 * the filesystem cannot reserve. */
int32_t sl_file_reserve(int64_t file, uint64_t size, sl_error *error);

/* Sets *bytes to how much of a range is in the page cache, in whole pages. SL_E_UNSUPPORTED if the system does not say:
 * Linux does, from 6.5 on for any file, earlier for files of this user. */
int32_t sl_file_resident(int64_t file, uint64_t offset, uint64_t size, uint64_t *bytes, sl_error *error);

/* The magic number of a file's system in statfs(2); 0 if unknown, and on other systems than Linux. */
uint32_t sl_file_system(int64_t file);

/* Blocks of a file that stay in the page cache, a byte each: 1 if the block stays. Blocks after `count` do not. */
#define SL_PAGES_BLOCK 4194304
typedef struct sl_pages {
    const uint8_t *kept;
    uint64_t count;
} sl_pages;

/* Drops a range of a file from the page cache, except for blocks that stay, and pages that are dirty or mapped. The
 * page runs that reads of smaller ranges leave at the beginning are dropped too. SL_E_UNSUPPORTED if the system cannot
 * drop pages, even if `size` is 0. */
int32_t sl_file_drop(int64_t file, const sl_pages *pages, uint64_t offset, uint64_t size, sl_error *error);

/* ---- safetensors (formats/safetensors.c) ---- */

/* Opens a file, reads and validates the header; the data is not touched. On failure nothing stays open. */
int32_t sl_safetensors_open(const char *path_utf8, sl_file *opened, sl_table **table, sl_error *error);

/* A file opened by sl_safetensors_load. */
typedef struct sl_loaded {
    sl_file file; /* closed, with handle -1, if `content` is set */
    sl_table *table;
    void *content;      /* all bytes of the file, to free with sl_free; NULL if the file is larger than `largest` */
    sl_columns columns; /* of `table` */
    sl_error error;     /* of the call; on failure everything else is untouched */
} sl_loaded;

/* Like sl_safetensors_open, but a file of at most `largest` bytes is read whole, with a single call, and closed. */
int32_t sl_safetensors_load(const char *path_utf8, uint64_t largest, sl_loaded *loaded);
/* Parses bytes in memory. */
int32_t sl_safetensors_parse(const void *data, uint64_t size, sl_table **table, sl_error *error);
sl_table *sl_safetensors_table(const void *data, uint64_t size); /* like sl_safetensors_parse; NULL on failure */

/* The only tensor of a file, if its bytes are its array (`plain`) and it fits the fields. */
typedef struct sl_lone {
    uint64_t set; /* 1 if there is such a tensor; else 0, and the other fields are untouched */
    uint64_t dtype, begin, name_size, rank, dims[8];
    char name[128];     /* UTF-8, not terminated */
    sl_columns columns; /* of the table that is returned */
} sl_lone;

/* Like sl_safetensors_table, but a single tensor is copied to `lone`, without a table: NULL is returned for it, too. */
sl_table *sl_safetensors_brief(const void *data, uint64_t size, sl_lone *lone);
/* Parses the first `held` bytes of a file of `file_size` bytes; they must include the header if its size is valid. */
int32_t sl_safetensors_parse_head(const void *data, uint64_t held, uint64_t file_size, sl_table **table,
                                  sl_error *error);

/* Builds the 8-byte length and the header (padded to 8) for tensors given as columns. Reads count, names, name_ends,
 * dtypes, dims, dim_ends, keeps_order and the metadata fields, and ignores the rest. order[k] is the index of the k-th
 * tensor in the file, sizes[i] the size of tensor i; both hold count entries. Free *header with sl_free. */
int32_t sl_safetensors_header(const sl_columns *tensors, uint32_t *order, uint64_t *sizes, void **header,
                              uint64_t *header_size, sl_error *error);

/* The header of at most SL_BRIEF tensors, with as many axes altogether as SL_BRIEF_AXES. */
#define SL_BRIEF 16
#define SL_BRIEF_AXES 64
typedef struct sl_brief_header {
    uint64_t places[2 * SL_BRIEF]; /* for `count` tensors first order, then sizes, as in sl_safetensors_header */
    char header[2048];
} sl_brief_header;

/* Like sl_safetensors_header, for few arguments, whose conversion takes as long as the work. `texts` has the names,
 * each with '\n' behind it, then the metadata. `numbers` has the count of tensors and the size of the names; then of
 * each tensor dtype, rank and dims; then 1 if there is metadata, else 0, the count of its keys, and the ends of its
 * texts. Returns the size of the header, or 0: for more tensors or axes, a longer header, a name with a newline, or
 * tensors that sl_safetensors_header refuses. */
uint64_t sl_safetensors_brief_header(const char *texts, const uint64_t *numbers, sl_brief_header *brief);
void sl_free(void *memory);

/* ---- GGUF (formats/gguf.c) ---- */

/* Types of metadata values, by the format's numbers. */
#define SL_GGUF_U8 0
#define SL_GGUF_I8 1
#define SL_GGUF_U16 2
#define SL_GGUF_I16 3
#define SL_GGUF_U32 4
#define SL_GGUF_I32 5
#define SL_GGUF_F32 6
#define SL_GGUF_BOOL 7
#define SL_GGUF_STRING 8
#define SL_GGUF_ARRAY 9
#define SL_GGUF_U64 10
#define SL_GGUF_I64 11
#define SL_GGUF_F64 12
#define SL_GGUF_TYPE_COUNT 13

/* A key of the metadata; ranges are bytes of the file. */
typedef struct sl_gguf_entry {
    uint64_t key_begin, key_end; /* UTF-8 */
    uint64_t begin, end;         /* the stored value, after its type */
    int32_t type;                /* SL_GGUF_U8 .. */
} sl_gguf_entry;

/* A tensor that the table lists as plain bytes: I2_S, which has its scale behind all codes (dtype SL_U8; rows are whole
 * blocks), or an unknown type (dtype SL_UNKNOWN; the bytes end where the next tensor begins). */
typedef struct sl_gguf_listed {
    uint64_t name_begin, name_end; /* bytes of the file, UTF-8 */
    uint64_t dims_begin;           /* of the logical shape in the file: u64, innermost first */
    int32_t rank;
    int32_t dtype;
    uint32_t type; /* number in enum ggml_type */
} sl_gguf_listed;

/* The metadata as stored in the file. All counts and lengths are checked. */
typedef struct sl_gguf {
    const uint8_t *bytes; /* the file up to the end of the tensor descriptions */
    uint64_t size;
    const sl_gguf_entry *entries; /* in file order */
    uint64_t count;
    uint64_t alignment; /* of the tensors */
    const sl_gguf_listed *listed;
    uint64_t listed_count;
    int32_t version;
} sl_gguf;

/* Reads and validates everything before the data of an open file of `file_size` bytes; the data is not touched. */
int32_t sl_gguf_read(int64_t file, uint64_t file_size, sl_table **table, sl_gguf **gguf, sl_error *error);
/* Like sl_gguf_read, for a file with its first `held` bytes in memory. SL_E_TRUNCATED if the header is longer: call
 * again with at least error->position bytes. */
int32_t sl_gguf_parse_head(const void *data, uint64_t held, uint64_t file_size, sl_table **table, sl_gguf **gguf,
                           sl_error *error);
void sl_gguf_free(sl_gguf *gguf); /* NULL: nothing */

/* ---- jobs: operations on byte ranges of files and memory (jobs/run.c) ---- */

/* Operations. Threads process the chunks of a job in any order, except for SL_OP_APPEND. SL_E_ARGUMENT if a job has a
 * grid, channels, codes or a merge that its operation does not take, lacks one that it needs, or has other dtypes. A
 * dtype is real if it converts to f32.
 *   COPY       the bytes unchanged; `from` and `to` are the same
 *   CONVERT    `from` to `to`; SL_E_RANGE for an element that does not fit into its block
 *   GRID       a strided 2-D copy (sl_grid), converted if `from` and `to` differ
 *   WRITE      memory to the file at `offset`
 *   WRITE_BACK like WRITE; each complete 16 MiB also begin to go to the disk, so that an fsync waits for less.
 *              With `pages`, earlier 16 MiB are waited for and dropped
 *   APPEND     memory to the file's current position, in order, by one thread: pipes and devices
 *   INT8       any real dtype times the factors of its channels, rounded half away from zero, within [-128, 127]
 *   ABSMAX     any real dtype: memory holds a u32 per channel, which is 0 or the result of other jobs, and is raised to
 *              the bits of the largest |x| (infinity and NaN exceed any number); factors are not used
 *   FINITE     any real dtype: writes nothing; SL_E_RANGE for NaN or infinity
 *   STATS      any real dtype: an sl_stats per segment, in order
 *   HISTOGRAM  like STATS, after SL_HISTOGRAM_BINS u64 counters to add to
 *   RESTORE    packed codes (sl_packed) to their values in f32, rounded once to `to`; or to other codes (sl_codes)
 *   WEIGHTED   any real dtype to blocks of `to` with importance: a channel per column, of rows that are whole blocks;
 *              SL_E_RANGE as CONVERT
 *   MERGE      any real dtype as f32, plus products of matrices (sl_merge), rounded once to the float `to`
 * The source of a packed job is the f32 values of its codes: `from` is SL_F32, and `size` is 4 bytes per value. INT8,
 * ABSMAX, FINITE, STATS, HISTOGRAM and WEIGHTED require codes in the order of the values. */
#define SL_OP_COPY 0
#define SL_OP_CONVERT 1
#define SL_OP_GRID 2
#define SL_OP_WRITE 3
#define SL_OP_APPEND 4
#define SL_OP_INT8 5
#define SL_OP_ABSMAX 6
#define SL_OP_FINITE 7
#define SL_OP_STATS 8
#define SL_OP_HISTOGRAM 9
#define SL_OP_RESTORE 10
#define SL_OP_WEIGHTED 11
#define SL_OP_MERGE 12
#define SL_OP_WRITE_BACK 13
#define SL_OP_COUNT 14

const char *sl_op_name(int32_t op); /* "copy"; NULL if out of range */

#define SL_MEMORY -1 /* for sl_job.file: the source is memory, and `offset` is its address */

/* A strided 2-D copy of elements (of whole bytes) that are not contiguous on both sides. Strides are bytes between
 * consecutive rows or columns. In memory they may have any value, even negative; in a file, columns must be contiguous
 * and rows must not overlap. */
typedef struct sl_grid {
    uint64_t rows, columns;
    int64_t source_row, source_column;
    int64_t memory_row, memory_column;
} sl_grid;

/* Channels of a tensor that becomes int8: the indices of an axis with a scale per index. */
typedef struct sl_channels {
    uint64_t count;       /* at least 1 */
    uint64_t inner;       /* element i belongs to channel i / inner % count; at least 1, whole blocks if count > 1 */
    const float *factors; /* per channel */
} sl_channels;

/* Layouts of packed codes: matrices of `rows` x `columns` codes, stored one after another. */
#define SL_LAYOUT_ROWS 0    /* a row is a little-endian bit stream, or 32-bit words with `word_codes` codes each */
#define SL_LAYOUT_COLUMNS 1 /* a column is a little-endian bit stream over the 32-bit words in this column; GPTQ */
#define SL_LAYOUT_WORDS 2   /* a row is 32-bit words of 8 codes of 4 bits in the order of AWQ's kernels */
#define SL_LAYOUT_PLANES 3  /* n = rows * bits / 8 rows of bytes; row r is plane r / n of bytes r % n; 2 or 4 bits */
#define SL_LAYOUT_BLOCKS 4  /* a row is whole blocks of the block type `codes`, with an additional scale */
#define SL_LAYOUT_MASKED 5  /* values of the dtype `codes` at the positions in a mask; all other values are 0 */
#define SL_LAYOUT_COUNT 6

/* Packed codes and their values: value = (table[code] - zero) * scale + bias, times the factor of the column, with each
 * step rounded to f32. Scale, zero and bias are looked up in a grid over the matrix. Of BLOCKS with a table only the
 * codes count: of 4 bits (the low nibbles first) or 8, at the end of each block of 32. */
typedef struct sl_packed {
    int32_t layout; /* SL_LAYOUT_ROWS .. */
    int32_t bits;   /* per code, 1 to 8 */
    int32_t codes;  /* with 8 bits and no table: the dtype of the codes' numbers; BLOCKS: the block type; MASKED: the
                     * dtype of the values */
    int32_t word_codes;  /* SL_LAYOUT_ROWS: codes in a 32-bit word with unused upper bits; 0: a bit stream */
    int32_t high_first;  /* in a stream of 4 bits, the high bits hold the first code; PLANES: and the first plane */
    int32_t transpose;   /* values are stored as columns x rows */
    int32_t forbidden;   /* PLANES and I2_S blocks: a code that writers never store, so SL_E_FORMAT; -1: none */
    int32_t interleaved; /* SL_LAYOUT_PLANES: row r is plane r % (8 / bits) of bytes r / (8 / bits) */
    int32_t divide;      /* SL_LAYOUT_ROWS with 8 bits, blocks and no table: values are codes / scales */
    uint64_t size;       /* stored bytes; the last row may end with its codes */
    uint64_t matrices, rows, columns;
    uint64_t row_bytes;                   /* between consecutive stored rows */
    const float *table;                   /* 2^bits numbers; NULL: see `codes` */
    uint64_t row_block, column_block;     /* rows and columns of a matrix per element of the grid */
    uint64_t grid_rows, grid_columns;     /* elements of a matrix's grid */
    uint64_t grid_step;                   /* elements between the grids of consecutive matrices; 0: a common grid */
    const float *scales, *zeros, *biases; /* grids, or NULL */
    /* Grids as they are stored, or NULL: converted when they are used, in place of `scales`, `zeros` and `biases`. Not
     * with groups of columns. */
    const void *stored_scales, *stored_zeros, *stored_biases;
    int32_t scale_dtype, bias_dtype; /* real, of 8, 16 or 32 bits */
    int32_t zero_layout;             /* zeros are codes of 4 bits: SL_LAYOUT_ROWS, COLUMNS or WORDS */
    int32_t shared_divides;
    uint64_t zero_bytes;     /* between consecutive stored rows of zeros */
    const float *zero_table; /* 16 numbers */
    const float *shared;     /* multiplies (divides) the stored scales of matrix m: shared[m * shared_step]; or NULL */
    uint64_t shared_step;
    /* Per column, or per row for COLUMNS and transposed WORDS: */
    const uint32_t *groups; /* its column (row) of the grid; NULL: blocks */
    const float *factors;   /* or NULL */
    const uint8_t *mask;    /* MASKED: a bit per column, lowest bit first; a row begins at a byte */
    const uint64_t *starts; /* MASKED: for every `mask_columns` columns of a row, the number of stored values before it,
                             * row after row, with an additional element at the end. `row_bytes` is not used */
    uint64_t mask_columns;
    uint64_t first_row; /* MASKED: the number of row 0 in messages */
} sl_packed;

/* Orders of codes in a row. */
#define SL_ORDER_STREAM 0 /* a little-endian bit stream */
#define SL_ORDER_HALVES 1 /* 4 bits: code i of a block of 32 and code i + 16 share a byte; ggml */
#define SL_ORDER_WORDS 2  /* 4 bits: 32-bit words of 8 codes in the order of AWQ's kernels */

/* Codes that values become, in the order of the values: a value must be an integer of magnitude below 2^22, and its
 * code is the integer modulo 2^bits. */
typedef struct sl_codes {
    int32_t bits;         /* per code, 1 to 8 */
    int32_t order;        /* SL_ORDER_STREAM .. */
    uint64_t row_bytes;   /* between rows; bytes after the codes of a row are not written */
    uint64_t block_bytes; /* between blocks of 32 codes; 0: rows without gaps */
} sl_codes;

/* Columns of a panel of sl_update.right. */
#define SL_MERGE_PANEL 32

/* A product of matrices to add to a matrix: scaling * (left * right). */
typedef struct sl_update {
    uint64_t rank;     /* columns of `left` and rows of `right`; at least 1 */
    const float *left; /* rows x rank */
    /* rank x columns, in panels: SL_MERGE_PANEL columns of all rows, then the next columns. The last panel is filled up
     * with zeros. */
    const float *right;
    float scaling;
    int32_t times; /* 1: the product of each element with that of the next update is added instead */
} sl_update;

/* Changes of a matrix, one after another, computed in f32. Every tier produces the same bits, except for the bits of a
 * NaN; kernels/merge.h defines the order of the sums. */
typedef struct sl_merge {
    uint64_t columns; /* of the matrix; at least 1, whole blocks. Its rows are the job's elements */
    uint64_t count;
    const sl_update *updates;
} sl_merge;

typedef struct sl_job {
    int32_t op;       /* SL_OP_COPY .. */
    int32_t from, to; /* dtypes of source and destination; operations that write no tensor ignore `to` */
    int64_t file;
    uint64_t offset;
    void *memory;                /* the destination; the source of a write */
    uint64_t size;               /* bytes of all elements at the source, whole blocks */
    const sl_grid *grid;         /* NULL: contiguous on both sides */
    const sl_channels *channels; /* NULL: values are not scaled */
    const sl_packed *packed;     /* NULL: the source holds elements of `from` */
    int64_t direct;              /* the file from sl_file_open_direct; 0 to read through the page cache, as grids and
                                  * packed codes always do */
    const sl_merge *merge;       /* NULL: nothing is added */
    const sl_pages *pages;       /* drop the file's pages from the page cache behind the job; NULL: all stay */
    const sl_codes *codes;       /* NULL: values are stored as `to` */
} sl_job;

/* Bytes of a thread's room for reads past the page cache, aligned to a page: a chunk, and the rest of its first and its
 * last page. */
#define SL_DIRECT_ROOM 3153920

/* Zero before the first call, except for `room`. */
typedef struct sl_cursor {
    uint64_t chunks_done; /* start of the next slice */
    uint64_t bytes_done;  /* for progress */
    uint64_t failed_job;  /* set on failure */
    int32_t finished;
    int32_t rooms; /* number of threads with a room; other threads read through the page cache */
    void *room;    /* SL_DIRECT_ROOM bytes per thread, aligned to a page */
} sl_cursor;

/* Works for at most slice_ms (0: no limit), joins its threads and returns. Should be called until cursor->finished.
 * threads must be >= 1. On failure error->position is the file offset that could not be read or written. */
int32_t sl_jobs_run(const sl_job *jobs, uint64_t count, int32_t tier, int32_t threads, int32_t slice_ms,
                    sl_cursor *cursor, sl_error *error);
