/* Names are sorted by a radix tree. Files list tensors layer by layer, so a name's place in the tree is near that of
 * the name before it, and a step up and a few steps down take less time than the comparisons of a sort. */
#include "formats/order.h"

#include <stdlib.h>

#define NONE UINT32_MAX

/* Deeper trees are not sorted here: each level is a name that continues in two ways, and real names have about ten. */
#define MAX_LEVELS 64

/* Node i is name i, a leaf; from `count` on, inner nodes. All names below an inner node share `depth` bytes. The
 * children of a node form a list, sorted by their next byte. */
typedef struct tree {
    const sl_names *names;
    uint32_t *next, *child, *depth, *sample; /* the last three by inner node; a sample is a name below it */
    uint8_t *byte;                           /* of a node, the byte after its parent's depth */
    uint32_t nodes;
    uint32_t *path[MAX_LEVELS]; /* from the root to the last name: the links that lead to each inner node */
    uint32_t *leaf;             /* the link that leads to the last name */
    int levels;
    uint64_t steps;
} tree;

static uint64_t begin_of(const sl_names *names, uint32_t i) { return i > 0 ? names->ends[i - 1] + 1 : 0; }

/* Returns how many bytes two names share, of which `from` are known. */
static uint64_t shared(const sl_names *names, uint32_t a, uint32_t b, uint64_t from) {
    uint64_t a_begin = begin_of(names, a), b_begin = begin_of(names, b);
    uint64_t most = sl_min_u64(names->ends[a] - a_begin, names->ends[b] - b_begin), k = from;
    const char *x = names->text + a_begin, *y = names->text + b_begin;
    for (; k + 8 <= most; k += 8) {
        uint64_t differing = sl_load_le64(x + k) ^ sl_load_le64(y + k);
        if (differing != 0) return k + (uint64_t)sl_trailing_zeros(differing) / 8;
    }
    while (k < most && x[k] == y[k]) k++;
    return k;
}

/* Returns a byte of a name, or 0 at its end, which sorts before all bytes of other names. */
static uint8_t byte_at(const sl_names *names, uint32_t i, uint64_t at) {
    char c = names->text[begin_of(names, i) + at];
    return c == '\n' ? 0 : (uint8_t)c;
}

/* Puts an inner node between a node and the link that leads to it; returns the inner node. */
static uint32_t split(tree *self, uint32_t *link, uint64_t depth) {
    uint32_t count = (uint32_t)self->names->count, node = *link, inner = self->nodes++;
    uint32_t sample = node < count ? node : self->sample[node - count];
    self->next[inner] = self->next[node];
    self->byte[inner] = self->byte[node];
    self->child[inner - count] = node;
    self->depth[inner - count] = (uint32_t)depth;
    self->sample[inner - count] = sample;
    self->next[node] = NONE;
    self->byte[node] = byte_at(self->names, sample, depth);
    *link = inner;
    return inner;
}

/* Adds a name after the one before it. Returns false if the tree is not worth building. */
static bool add(tree *self, uint32_t name) {
    const sl_names *names = self->names;
    const uint32_t count = (uint32_t)names->count;
    uint64_t depth = shared(names, name - 1, name, 0);
    uint32_t *link = self->leaf;
    while (self->levels > 0 && self->depth[*self->path[self->levels - 1] - count] > depth)
        link = self->path[--self->levels];
    if (self->levels > 0 && self->depth[*self->path[self->levels - 1] - count] == depth)
        link = self->path[--self->levels];
    else
        split(self, link, depth);
    for (;;) { /* `link` leads to an inner node that shares `depth` bytes with the name */
        uint8_t byte = byte_at(names, name, depth);
        if (self->levels == MAX_LEVELS || (byte == 0 && depth < names->ends[name] - begin_of(names, name)))
            return false;
        self->path[self->levels++] = link;
        link = &self->child[*link - count];
        for (; *link != NONE && self->byte[*link] < byte; self->steps++) link = &self->next[*link];
        if (*link == NONE || self->byte[*link] > byte) {
            self->next[name] = *link;
            self->byte[name] = byte;
            *link = name;
            self->leaf = link;
            return true;
        }
        uint32_t node = *link;
        bool inner = node >= count;
        if (byte == 0) return false; /* a duplicate */
        depth = shared(names, name, inner ? self->sample[node - count] : node, depth + 1);
        if (inner && depth >= self->depth[node - count])
            depth = self->depth[node - count];
        else
            split(self, link, depth);
        self->steps++;
    }
}

/* Returns false if the tree is too deep: a split also moves down what is below it. */
static bool list(const tree *self, uint32_t root, uint32_t *order) {
    const uint32_t count = (uint32_t)self->names->count;
    uint32_t later[MAX_LEVELS], node = root;
    int levels = 0;
    for (uint64_t listed = 0; listed < count;) {
        if (node == NONE)
            node = later[--levels];
        else if (node >= count) {
            if (levels == MAX_LEVELS) return false;
            later[levels++] = self->next[node];
            node = self->child[node - count];
        } else {
            order[listed++] = node;
            node = self->next[node];
        }
    }
    return true;
}

bool sl_order_names(const sl_names *names, uint32_t *order) {
    const uint64_t count = names->count;
    if (count > NONE / 2 || names->ends[count - 1] > UINT32_MAX) return false;
    uint32_t *memory = malloc((size_t)count * (5 * sizeof *memory + 2)), root = 0;
    if (memory == NULL) return false;
    tree self = {.names = names,
                 .next = memory,
                 .child = memory + 2 * count,
                 .depth = memory + 3 * count,
                 .sample = memory + 4 * count,
                 .byte = (uint8_t *)(memory + 5 * count),
                 .nodes = (uint32_t)count,
                 .leaf = &root};
    self.next[0] = NONE;
    self.byte[0] = 0;
    bool sorted = true;
    for (uint32_t i = 1; i < count && sorted; i++) sorted = self.steps <= 8 * (uint64_t)i + 1024 && add(&self, i);
    sorted = sorted && list(&self, root, order);
    free(memory);
    return sorted;
}
