// Tensor cores at the pace of a slower card: PACE_DUMMIES mma beside each real one, which add zero. A kernel that is built with
// this is measured and never used. Each of them must follow from the one before and lead to the one after, or ptxas removes it, or
// moves all of them to where nothing waits for them:
//   - the first one adds zero to the real one's own accumulator, with the zeros of a spare accumulator as B;
//   - the others add zero to spare accumulators, each with the zeros of another one as B, as its last group has left it.
// So no group can lag behind by more than two, and what waits for a real result waits no longer than for an mma. The spare
// accumulators are of 16-bit floats, which take two registers: three of them, so that each is used once in a group of five, as often as
// the latency of an mma lets one warp alone. An operand A that is not finite makes NaN of all that follows.

namespace ptx {

// Registers of the kernel's scope, by name: no argument of mma_m16n8k16 has to hand them on. At the start of the kernel.
__device__ __forceinline__ void pace_begin() {
  asm volatile(
      ".reg .b32 spare<6>;\n"
      "mov.b32 spare0, 0;\n"
      "mov.b32 spare1, 0;\n"
      "mov.b32 spare2, 0;\n"
      "mov.b32 spare3, 0;\n"
      "mov.b32 spare4, 0;\n"
      "mov.b32 spare5, 0;");
}

// accumulator (16x8, fp32) += a (16x16) * b (16x8), and its dummies.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  uint32_t zeros[2];
  asm volatile("mov.b32 %0, spare4;\nmov.b32 %1, spare5;" : "=r"(zeros[0]), "=r"(zeros[1]));
  unpaced_mma_m16n8k16<Element>(accumulator, a, zeros[0], zeros[1]);
#pragma unroll
  for (int i = 0; i < PACE_DUMMIES - 1; i++) {
    if (i % 3 == 0)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
          "{spare4, spare5}, {%0, %1, %2, %3}, {spare2, spare3}, {spare4, spare5};" ::"r"(a[0]),
          "r"(a[1]), "r"(a[2]), "r"(a[3]));
    else if (i % 3 == 1)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
          "{spare2, spare3}, {%0, %1, %2, %3}, {spare0, spare1}, {spare2, spare3};" ::"r"(a[0]),
          "r"(a[1]), "r"(a[2]), "r"(a[3]));
    else
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
          "{spare0, spare1}, {%0, %1, %2, %3}, {spare0, spare1}, {spare0, spare1};" ::"r"(a[0]),
          "r"(a[1]), "r"(a[2]), "r"(a[3]));
  }
  unpaced_mma_m16n8k16<Element>(accumulator, a, b0, b1);
}

}  // namespace ptx
