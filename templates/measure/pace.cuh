// Tensor cores at the pace of a slower card: PACE_DUMMIES mma after each real one, which add zero to spare accumulators. A
// kernel that is built with this is measured and never used.
//
// The spare accumulators have 16-bit floats, two registers each: as little as can be taken from the kernel. There are four, so
// that a warp that has the tensor core for itself, when ptxas has moved dummies together, finds one whose last mma has ended:
// fewer would be slower than the card. An mma whose result nobody wants is removed by ptxas: they are added up at the end.

namespace ptx {

constexpr int PACE_SPARES = 4;

// Registers of the kernel's scope, by name: no argument of mma_m16n8k16 has to hand them on. At the start of the kernel.
__device__ __forceinline__ void pace_begin() {
  asm volatile(
      ".reg .b32 spare<8>;\n"
      "mov.b32 spare0, 0;\n"
      "mov.b32 spare1, 0;\n"
      "mov.b32 spare2, 0;\n"
      "mov.b32 spare3, 0;\n"
      "mov.b32 spare4, 0;\n"
      "mov.b32 spare5, 0;\n"
      "mov.b32 spare6, 0;\n"
      "mov.b32 spare7, 0;");
}

// At the end of the kernel: a value that depends on every dummy. Zero, or not a number where an operand was none.
__device__ __forceinline__ uint32_t pace_end() {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .b32 sum;\n"
      "or.b32 sum, spare0, spare1;\n"
      "or.b32 sum, sum, spare2;\n"
      "or.b32 sum, sum, spare3;\n"
      "or.b32 sum, sum, spare4;\n"
      "or.b32 sum, sum, spare5;\n"
      "or.b32 sum, sum, spare6;\n"
      "or.b32 %0, sum, spare7;\n"
      "}"
      : "=r"(all));
  return all;
}

// An accumulator (16x8, fp16) += a (16x16) * b (16x8). As b it takes itself, which is zero: that needs no register.
#define BWDTUNE_DUMMY_MMA(spare)                              \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 " spare ", {%0, %1, %2, %3}, " spare ", " spare ";" ::"r"(a[0]), \
               "r"(a[1]), "r"(a[2]), "r"(a[3]))

// accumulator (16x8, fp32) += a (16x16) * b (16x8), and its dummies.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  unpaced_mma_m16n8k16<Element>(accumulator, a, b0, b1);
#pragma unroll
  for (int i = 0; i < PACE_DUMMIES; i++) {
    if (i % PACE_SPARES == 0) BWDTUNE_DUMMY_MMA("{spare0, spare1}");
    if (i % PACE_SPARES == 1) BWDTUNE_DUMMY_MMA("{spare2, spare3}");
    if (i % PACE_SPARES == 2) BWDTUNE_DUMMY_MMA("{spare4, spare5}");
    if (i % PACE_SPARES == 3) BWDTUNE_DUMMY_MMA("{spare6, spare7}");
  }
}

#undef BWDTUNE_DUMMY_MMA

}  // namespace ptx
