#define _GNU_SOURCE /* memfd_create */
#include "property.h"

#include <sys/mman.h>
#include <unistd.h>

#include "base/sort.h"
#include "base/utf8.h"
#include "kernels/dtype.h"

#define UNTOUCHED 77

typedef struct span {
    uint64_t begin, end;
} span;

static span name_span(const sl_columns *columns, uint64_t i) {
    return (span){i > 0 ? columns->name_ends[i - 1] + 1 : 0, columns->name_ends[i]};
}

static span dim_span(const sl_columns *columns, uint64_t i) {
    return (span){i > 0 ? columns->dim_ends[i - 1] : 0, columns->dim_ends[i]};
}

static bool same_bytes(const void *a, const void *b, uint64_t size) {
    return size == 0 || memcmp(a, b, (size_t)size) == 0;
}

sl_error untouched_error(void) {
    sl_error error;
    memset(&error, 0, sizeof error);
    error.status = UNTOUCHED;
    return error;
}

void check_error(const sl_error *error, int32_t status, uint64_t size) {
    if (status == SL_OK) {
        REQUIRE(error->status == UNTOUCHED);
        return;
    }
    REQUIRE(status > SL_OK && status <= SL_E_UNSUPPORTED);
    REQUIRE(error->status == status);
    const char *end = memchr(error->message, '\0', sizeof error->message);
    REQUIRE(end != NULL && end > error->message);
    size_t length = (size_t)(end - error->message);
    REQUIRE(sl_utf8_valid(error->message, length) == length);
    REQUIRE(error->position >= -1 && (error->position < 0 || (uint64_t)error->position <= size));
}

static void check_names(const sl_table *table, const sl_columns *columns) {
    bool newline = false;
    for (uint64_t i = 0; i < columns->count; i++) {
        span name = name_span(columns, i);
        REQUIRE(name.begin <= name.end && name.end < columns->names_size);
        size_t size = (size_t)(name.end - name.begin);
        const char *text = columns->names + name.begin;
        REQUIRE(text[size] == '\n');
        REQUIRE(sl_utf8_valid(text, size) == size);
        newline |= memchr(text, '\n', size) != NULL;
        REQUIRE(sl_table_find(table, text, size) == (int64_t)i);
        /* With its separator it is another name, unless some tensor is called just that. */
        int64_t longer = sl_table_find(table, text, size + 1);
        REQUIRE(longer < 0 || columns->newline_in_names);
    }
    REQUIRE((columns->newline_in_names != 0) == newline);
    REQUIRE(columns->names_size == (columns->count > 0 ? columns->name_ends[columns->count - 1] + 1 : 0));
    bool ascend = true;
    for (uint64_t k = 1; k < columns->count; k++) {
        span a = name_span(columns, k - 1), b = name_span(columns, k);
        ascend &= sl_compare_bytes(columns->names + a.begin, a.end - a.begin, columns->names + b.begin,
                                   b.end - b.begin) < 0;
    }
    REQUIRE((columns->names_ascend != 0) == ascend);
}

/* The table in whose names places are counted. */
static const sl_table *named;

static void *find_name(const char *name, ptrdiff_t size) {
    int64_t found = sl_table_find(named, name, (uint64_t)size);
    REQUIRE(found >= 0 &&
            sl_table_columns(named)->names + name_span(sl_table_columns(named), (uint64_t)found).begin == name);
    return (void *)(uintptr_t)(found + 1);
}

static int put_name(void *list, ptrdiff_t place, void *object) {
    ptrdiff_t *places = list;
    REQUIRE(places[-1]++ == place);
    places[place] = (ptrdiff_t)(uintptr_t)object - 1;
    return 0;
}

/* In file order and sorted, every name is listed once. */
static void check_listed_names(const sl_table *table, const sl_columns *columns) {
    ptrdiff_t *places = malloc((size_t)(columns->count + 1) * sizeof *places);
    REQUIRE(places != NULL);
    named = table;
    for (int sorted = 0; sorted < 2; sorted++) {
        places[0] = 0;
        int32_t ascend = sl_table_list_names(table, sorted, (void *)(uintptr_t)find_name, (void *)(uintptr_t)put_name,
                                             places + 1);
        REQUIRE((uint64_t)places[0] == columns->count);
        for (uint64_t k = 0; k < columns->count; k++) {
            REQUIRE(sorted || (uint64_t)places[k + 1] == k);
            if (!ascend || k == 0) continue;
            span a = name_span(columns, (uint64_t)places[k]), b = name_span(columns, (uint64_t)places[k + 1]);
            REQUIRE(sl_compare_bytes(columns->names + a.begin, a.end - a.begin, columns->names + b.begin,
                                     b.end - b.begin) < 0);
        }
        REQUIRE(ascend || !columns->names_ascend);
    }
    free(places);
}

/* An object of the lists: a number, or a tuple of objects. */
typedef struct object {
    struct object *made_before;
    uint64_t value; /* or the size of the tuple */
    struct object *items[];
} object;

static object *last_made;

static void *new_object(uint64_t value, uint64_t size) {
    object *made = calloc(1, sizeof *made + (size_t)size * sizeof made->items[0]);
    REQUIRE(made != NULL);
    made->made_before = last_made;
    made->value = value;
    return last_made = made;
}

static void *new_number(unsigned long long value) { return new_object(value, 0); }

static void *new_tuple(ptrdiff_t size) { return new_object((uint64_t)size, (uint64_t)size); }

static int fill_tuple(void *tuple, ptrdiff_t place, void *item) {
    object *filled = tuple;
    REQUIRE(place >= 0 && (uint64_t)place < filled->value && filled->items[place] == NULL);
    filled->items[place] = item;
    return 0;
}

static int fill_list(void *list, ptrdiff_t place, void *item) {
    object **items = list;
    REQUIRE(items[place] == NULL);
    items[place] = item;
    return 0;
}

static void keep(void *item) { REQUIRE(item != NULL); }

static void check_dims(const sl_columns *columns, uint64_t i, const object *shape) {
    span dims = dim_span(columns, i);
    REQUIRE(shape != NULL && shape->value == dims.end - dims.begin);
    for (uint64_t k = 0; k < shape->value; k++) REQUIRE(shape->items[k]->value == columns->dims[dims.begin + k]);
}

/* Lists of entries and shapes hold what the columns hold. */
static void check_lists(const sl_table *table, const sl_columns *columns) {
    const sl_makers makers = {(void *)(uintptr_t)new_number, (void *)(uintptr_t)new_tuple,
                              (void *)(uintptr_t)fill_tuple, (void *)(uintptr_t)fill_list, (void *)(uintptr_t)keep};
    uint64_t count = columns->count, begin = count / 3;
    object **lists = calloc((size_t)count * 2 + 1, sizeof(object *));
    REQUIRE(lists != NULL);
    REQUIRE(sl_table_list_entries(table, &makers, lists) == 1);
    REQUIRE(sl_table_list_shapes(table, begin, count, &makers, lists + count + begin) == 1);
    for (uint64_t i = 0; i < count; i++) {
        object *const *entry = lists[i]->items;
        REQUIRE(lists[i]->value == 4 && entry[0]->value == columns->dtypes[i]);
        REQUIRE(entry[2]->value == columns->begins[i] && entry[3]->value == columns->ends[i]);
        check_dims(columns, i, entry[1]);
        if (i >= begin) check_dims(columns, i, lists[count + i]);
    }
    free(lists);
    while (last_made != NULL) {
        object *made_before = last_made->made_before;
        free(last_made);
        last_made = made_before;
    }
}

/* Bytes that the shape of tensor i takes. */
static uint64_t size_of(const sl_columns *columns, uint64_t i) {
    const sl_dtype_info *info = sl_dtype_get(columns->dtypes[i]);
    REQUIRE(info != NULL);
    span dims = dim_span(columns, i);
    REQUIRE(dims.begin <= dims.end && dims.end - dims.begin <= SL_MAX_RANK);
    uint64_t elements = 1;
    for (uint64_t k = dims.begin; k < dims.end; k++)
        if (columns->dims[k] == 0) return 0;
    for (uint64_t k = dims.begin; k < dims.end; k++) REQUIRE(sl_mul_u64(elements, columns->dims[k], &elements));
    REQUIRE(elements % (uint64_t)info->block == 0);
    return elements / (uint64_t)info->block * (uint64_t)info->block_bytes;
}

static void check_ranges(const sl_columns *columns, const uint8_t *data, uint64_t size) {
    uint64_t covered = 0;
    unsigned sum = 0;
    for (uint64_t i = 0; i < columns->count; i++) {
        uint64_t begin = columns->begins[i], end = columns->ends[i];
        REQUIRE(begin <= end && end - begin == size_of(columns, i));
        REQUIRE(begin >= covered);
        covered = end;
        if (begin == end) continue; /* GGUF lets the data begin past the end where it is empty */
        REQUIRE(end <= size);
        if (data != NULL) sum += (unsigned)data[begin] + (unsigned)data[end - 1];
    }
    volatile unsigned read = sum; /* so that the loads are not optimized away */
    (void)read;
}

static void check_metadata(const sl_columns *columns) {
    REQUIRE(columns->has_metadata || columns->metadata_count == 0);
    uint64_t begin = 0;
    for (uint64_t k = 0; k < 2 * columns->metadata_count; k++) {
        uint64_t end = columns->metadata_ends[k];
        REQUIRE(begin <= end && end <= columns->metadata_size);
        size_t length = (size_t)(end - begin);
        REQUIRE(length == 0 || sl_utf8_valid(columns->metadata_text + begin, length) == length);
        begin = end;
    }
    REQUIRE(begin == columns->metadata_size);
}

void check_table(const sl_table *table, const uint8_t *data, uint64_t size) {
    const sl_columns *columns = sl_table_columns(table);
    check_names(table, columns);
    check_listed_names(table, columns);
    check_lists(table, columns);
    check_ranges(columns, data, size);
    check_metadata(columns);
}

void check_same_tensor(const sl_columns *a, uint64_t i, const sl_columns *b, uint64_t k) {
    span a_name = name_span(a, i), b_name = name_span(b, k), a_dims = dim_span(a, i), b_dims = dim_span(b, k);
    uint64_t name_size = a_name.end - a_name.begin, rank = a_dims.end - a_dims.begin;
    REQUIRE(name_size == b_name.end - b_name.begin && rank == b_dims.end - b_dims.begin);
    REQUIRE(same_bytes(a->names + a_name.begin, b->names + b_name.begin, name_size));
    REQUIRE(same_bytes(a->dims + a_dims.begin, b->dims + b_dims.begin, rank * sizeof *a->dims));
    REQUIRE(a->dtypes[i] == b->dtypes[k]);
    REQUIRE(a->ends[i] - a->begins[i] == b->ends[k] - b->begins[k]);
}

void check_shifted_table(const sl_table *a, const sl_table *b, uint64_t shift) {
    const sl_columns *left = sl_table_columns(a), *right = sl_table_columns(b);
    REQUIRE(left->count == right->count);
    for (uint64_t i = 0; i < left->count; i++) {
        check_same_tensor(left, i, right, i);
        REQUIRE(left->begins[i] + shift == right->begins[i]);
    }
}

int memory_file(const uint8_t *data, size_t size) {
    static int file = -1;
    if (file < 0) file = memfd_create("fuzz", 0);
    REQUIRE(file >= 0 && ftruncate(file, (off_t)size) == 0);
    REQUIRE(size == 0 || pwrite(file, data, size, 0) == (ssize_t)size);
    return file;
}
