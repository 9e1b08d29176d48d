/* Processor features, detected at run time. */
#include "platform/cpu.h"

#include "platform/platform.h"

#if defined(__x86_64__) || defined(_M_X64)

#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif

static void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t out[4]) {
#if defined(_MSC_VER)
    int registers[4];
    __cpuidex(registers, (int)leaf, (int)subleaf);
    for (int i = 0; i < 4; i++) out[i] = (uint32_t)registers[i];
#else
    __cpuid_count(leaf, subleaf, out[0], out[1], out[2], out[3]);
#endif
}

static uint64_t xcr0(void) {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* the intrinsic would need -mxsave */
    return (uint64_t)high << 32 | low;
#endif
}

static bool bit(uint32_t word, int index) { return (word >> index & 1) != 0; }

enum { AVX2 = 1, AVX512 = 2, UNKNOWN = 4 };

/* Intel SDM vol. 1, 13.3 and 14.3: leaf 1 ECX bits 12 FMA, 23 POPCNT, 27 OSXSAVE, 28 AVX, 29 F16C; leaf 7 EBX bits 5
 * AVX2, 16 AVX512F, 17 DQ, 30 BW, 31 VL; XCR0 bits 1-2 for YMM, 5-7 for ZMM and masks. */
static uint64_t detect(void) {
    uint32_t zero[4], one[4], seven[4];
    cpuid(0, 0, zero);
    if (zero[0] < 7) return 0;
    cpuid(1, 0, one);
    cpuid(7, 0, seven);
    if (!bit(one[2], 27)) return 0;
    uint64_t saved = xcr0();
    bool avx2 = bit(one[2], 12) && bit(one[2], 28) && bit(one[2], 29) && bit(seven[1], 5) && (saved & 0x6) == 0x6;
    bool avx512 = avx2 && bit(one[2], 23) && bit(seven[1], 16) && bit(seven[1], 17) && bit(seven[1], 30) &&
                  bit(seven[1], 31) && (saved & 0xe6) == 0xe6;
    return (avx2 ? AVX2 : 0) | (avx512 ? AVX512 : 0);
}

sl_cpu sl_cpu_detect(void) {
    static sl_atomic known = {UNKNOWN}; /* because hypervisors intercept CPUID, which then takes microseconds */
    uint64_t features = sl_atomic_load(&known);
    if (features == UNKNOWN) {
        features = detect();
        sl_atomic_lower(&known, features);
    }
    sl_cpu cpu = {(features & AVX2) != 0, (features & AVX512) != 0, false};
    return cpu;
}

#else

sl_cpu sl_cpu_detect(void) {
    sl_cpu cpu = {false, false, false};
#if defined(__aarch64__) || defined(_M_ARM64)
    cpu.neon = true;
#endif
    return cpu;
}

#endif
