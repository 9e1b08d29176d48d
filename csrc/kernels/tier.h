/* Instruction sets by number (sl_api.h): the kernels of each tier, or of a tier below if it has none. The tier must be
 * available. */
#ifndef SL_TIER_H
#define SL_TIER_H

#include "kernels/convert.h"
#include "kernels/difference.h"
#include "kernels/encode.h"
#include "kernels/merge.h"
#include "kernels/quant.h"
#include "kernels/restore.h"
#include "kernels/stats.h"

/* The kernel of a direct conversion, or NULL. */
sl_convert_fn sl_tier_convert(int32_t tier, int32_t from, int32_t to);

/* The kernels of int8; none is NULL. */
sl_quant sl_tier_quant(int32_t tier);

/* The kernel that quantizes to blocks with importance, or NULL. */
sl_weighted_fn sl_tier_weighted(int32_t tier, int32_t to);

/* The kernels of dequantization; none is NULL. */
sl_restore sl_tier_restore(int32_t tier);

/* The kernel of a dtype's statistics, or NULL. */
sl_lanes_fn sl_tier_lanes(int32_t tier, int32_t from);

/* The steps of quantization for other engines. */
sl_encode_steps sl_tier_encode(int32_t tier);

/* The kernel that adds products. */
sl_merge_fn sl_tier_merge(int32_t tier);

/* The kernel of differences. */
sl_difference_fn sl_tier_difference(int32_t tier);

#endif
