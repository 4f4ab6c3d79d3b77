// One step of k of 4 rows by 3 weight rows in AVX2's 16 registers: 12 sums, 3 weights
// and a row. Compilers find no room for it and keep a sum in memory, at little more
// than half the speed; so it stands in assembly. Same products and same order as `step`
// in gemm.h.

#pragma once

#include <cstdint>

#include "packed_rows.h"
#include "simd.h"

// (Sanitizers do not see into assembly: they are given the other form.)
#if defined(SPEC_JAX_AVX2) && !defined(SPEC_JAX_NO_ASSEMBLY)

namespace spec_jax {

// Row `r`, at `offset` bytes, times the weights in ymm13 to ymm15.
#define SPEC_JAX_ROW(r, offset)                           \
  "vmovups " #offset "(%[x]), %%ymm12\n\t"                \
  "vfmadd231ps %%ymm12, %%ymm13, %[a" #r "0]\n\t"         \
  "vfmadd231ps %%ymm12, %%ymm14, %[a" #r "1]\n\t"         \
  "vfmadd231ps %%ymm12, %%ymm15, %[a" #r "2]\n\t"
#define SPEC_JAX_SUM(r, j) [a##r##j] "+x"(acc[r][j])
#define SPEC_JAX_SUMS(r) SPEC_JAX_SUM(r, 0), SPEC_JAX_SUM(r, 1), SPEC_JAX_SUM(r, 2)
#define SPEC_JAX_OPERANDS                                                         \
  : SPEC_JAX_SUMS(0), SPEC_JAX_SUMS(1), SPEC_JAX_SUMS(2), SPEC_JAX_SUMS(3)        \
  : [x] "r"(x + k * 4), [w] "r"(w + k), [stride] "r"(stride * sizeof(*w)),        \
    [odd] "m"(kOddMask)                                                           \
  : "xmm12", "xmm13", "xmm14", "xmm15", "memory"

alignas(32) constexpr uint32_t kOddMask[] = {0xffff0000u, 0xffff0000u, 0xffff0000u,
                                             0xffff0000u, 0xffff0000u, 0xffff0000u,
                                             0xffff0000u, 0xffff0000u};
static_assert(kStep * sizeof(float) == 64, "rows of a step are 64 bytes apart");

inline void step(const float* x, const bf16* w, int64_t stride, int64_t& k,
                 Vec (&acc)[4][3]) {
  asm("vmovdqu (%[w]), %%ymm13\n\t"
      "vmovdqu (%[w],%[stride]), %%ymm14\n\t"
      "vmovdqu (%[w],%[stride],2), %%ymm15\n\t"
      "vpslld $16, %%ymm13, %%ymm13\n\t"
      "vpslld $16, %%ymm14, %%ymm14\n\t"
      "vpslld $16, %%ymm15, %%ymm15\n\t"  //
      SPEC_JAX_ROW(0, 0) SPEC_JAX_ROW(1, 64) SPEC_JAX_ROW(2, 128) SPEC_JAX_ROW(3, 192)
      "vmovdqa %[odd], %%ymm13\n\t"
      "vmovdqa %%ymm13, %%ymm14\n\t"
      "vmovdqa %%ymm13, %%ymm15\n\t"
      "vpand (%[w]), %%ymm13, %%ymm13\n\t"
      "vpand (%[w],%[stride]), %%ymm14, %%ymm14\n\t"
      "vpand (%[w],%[stride],2), %%ymm15, %%ymm15\n\t"  //
      SPEC_JAX_ROW(0, 32) SPEC_JAX_ROW(1, 96) SPEC_JAX_ROW(2, 160) SPEC_JAX_ROW(3, 224)
      SPEC_JAX_OPERANDS);
}

inline void step(const float* x, const float* w, int64_t stride, int64_t& k,
                 Vec (&acc)[4][3]) {
  asm("vmovups (%[w]), %%ymm13\n\t"
      "vmovups (%[w],%[stride]), %%ymm14\n\t"
      "vmovups (%[w],%[stride],2), %%ymm15\n\t"  //
      SPEC_JAX_ROW(0, 0) SPEC_JAX_ROW(1, 64) SPEC_JAX_ROW(2, 128) SPEC_JAX_ROW(3, 192)
      "vmovups 32(%[w]), %%ymm13\n\t"
      "vmovups 32(%[w],%[stride]), %%ymm14\n\t"
      "vmovups 32(%[w],%[stride],2), %%ymm15\n\t"  //
      SPEC_JAX_ROW(0, 32) SPEC_JAX_ROW(1, 96) SPEC_JAX_ROW(2, 160) SPEC_JAX_ROW(3, 224)
      SPEC_JAX_OPERANDS);
}

#undef SPEC_JAX_ROW
#undef SPEC_JAX_SUM
#undef SPEC_JAX_SUMS
#undef SPEC_JAX_OPERANDS

}  // namespace spec_jax

#endif
