/* Pages of files that leave the page cache. */
#include "platform/platform.h"

/* The longest run of pages that the cache takes and drops as a whole: a huge page, at a multiple of its size. */
#define RUN ((uint64_t)2 << 20)

int32_t sl_file_drop(int64_t file, const sl_pages *pages, uint64_t offset, uint64_t size, sl_error *error) {
    uint64_t end = offset + size, at = offset - offset % RUN;
    bool can = sl_platform_drop(file, 0, 0);
    while (can && size > 0 && at < end) { /* ranges without blocks that stay */
        uint64_t block = at / SL_PAGES_BLOCK, from = at;
        while (at < end && (block >= pages->count || !pages->kept[block])) at = ++block * SL_PAGES_BLOCK;
        if (at > from) can = sl_platform_drop(file, from, sl_min_u64(at, end) - from);
        at = (block + 1) * SL_PAGES_BLOCK;
    }
    return can ? SL_OK : sl_fail(error, SL_E_UNSUPPORTED, -1, "the system cannot drop pages from the page cache");
}
