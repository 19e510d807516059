// The kernels' C interface over a naive fp32 backward on the CPU: a correct kernel for tests of what stands around one, and
// with a fault, kernels that are wrong in one way each. It is compiled once: what a library computes stands in `settings`,
// which `stub_kernels.py` overwrites in copies of the file.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "interface.h"

// Such as " HEAD_DIM=64 MASK=causal ". Hidden, so that each of several libraries in a process reads its own.
__attribute__((visibility("hidden"))) char settings[512] = "settings of a stub kernel";

namespace {

std::string text(const char* name) {
  const char* value = std::strstr(settings, (std::string(" ") + name + "=").c_str());
  if (!value) std::abort();
  value = std::strchr(value, '=') + 1;
  return std::string(value, std::strchr(value, ' '));
}
int number(const char* name) { return std::atoi(text(name).c_str()); }

int mask() {
  const std::string name = text("MASK");
  return name == "full" ? BWDTUNE_MASK_FULL : name == "causal" ? BWDTUNE_MASK_CAUSAL : BWDTUNE_MASK_WINDOW;
}

const bool BF16 = text("DTYPE") == "bf16";
const int HEAD_DIM = number("HEAD_DIM"), HEAD_DIM_V = number("HEAD_DIM_V"), ABI_VERSION = number("ABI_VERSION");
const int MASK = mask();
const bool BOTTOM_RIGHT = number("BOTTOM_RIGHT"), SOFTCAP = number("SOFTCAP"), VARLEN = number("VARLEN"),
           DETERMINISTIC = number("DETERMINISTIC"), LSE_GRAD = number("LSE_GRAD"), SINK = number("SINK"),
           ALIBI = number("ALIBI"), BIAS_GRAD = number("BIAS_GRAD");
const std::string BIAS = text("BIAS"), BIAS_DTYPE = text("BIAS_DTYPE");

// NONE, or
//   HALF_OF_THE_ROWS     leaves the second half of dk and dv as it was
//   ACCUMULATES          adds to dq without clearing it
//   OTHER_MASK           the diagonal one too far
//   CHANGES_AN_INPUT     writes to k
//   NAN_TAIL             the last row of dq is not a number where seqlen_q is odd
//   ONE_ELEMENT          one wrong element in dv, after the first tile
//   WRITES_PAST_THE_END  the row after the last of dk
//   FORGETS_THE_SCALE    in dq
//   READS_THE_WORKSPACE  as if it were cleared
//   FORGETS_STRIDES      takes dout for packed
//   ONE_QUERY_HEAD       of a group adds to dk and dv
//   SEGFAULT, ABORTS, ENDLESS, ERROR_CODE
const std::string FAULT = text("FAULT");

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float load_bf16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }
uint16_t store_bf16(float x) {
  if (std::isnan(x)) return 0x7fc0;
  const uint32_t bits = to_bits(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float load_fp16(uint16_t x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                          : exponent     ? std::ldexp(1024.f + fraction, exponent - 25)
                                         : std::ldexp(static_cast<float>(fraction), -24);
  return x >> 15 ? -magnitude : magnitude;
}
uint16_t store_fp16(float x) {
  const uint16_t sign = to_bits(x) >> 16 & 0x8000;
  if (std::isnan(x)) return 0x7e00;
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520.f) return sign | 0x7c00;
  if (magnitude < std::ldexp(1.f, -14)) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  const int exponent = std::ilogb(magnitude);
  return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)) + ((exponent + 14) << 10));
}
float load(uint16_t x) { return BF16 ? load_bf16(x) : load_fp16(x); }
uint16_t store(float x) { return BF16 ? store_bf16(x) : store_fp16(x); }

// Of a bias and its gradient: 0 for bf16, 1 for fp16, 2 for fp32.
const int BIAS_KIND = BIAS_DTYPE == "fp32" ? 2 : BIAS_DTYPE == "fp16";

float load_bias(const bwdtune_tensor& t, int64_t at) {
  if (BIAS_KIND == 2) return static_cast<const float*>(t.data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(t.data)[at];
  return BIAS_KIND ? load_fp16(bits) : load_bf16(bits);
}

void store_bias(const bwdtune_tensor& t, int64_t at, float x) {
  if (BIAS_KIND == 2)
    static_cast<float*>(t.data)[at] = x;
  else
    static_cast<uint16_t*>(t.data)[at] = BIAS_KIND ? store_fp16(x) : store_bf16(x);
}

struct Rows {
  uint16_t* data;
  int64_t stride;

  Rows(const bwdtune_tensor& t, int64_t batch, int64_t head, int64_t first = 0)
      : data(static_cast<uint16_t*>(t.data) + batch * t.stride_batch + head * t.stride_head + first * t.stride_seqlen),
        stride(t.stride_seqlen) {}
  std::vector<float> load(int64_t rows, int columns) const {
    std::vector<float> values(rows * columns);
    for (int64_t i = 0; i < rows * columns; i++) values[i] = ::load(data[i / columns * stride + i % columns]);
    return values;
  }
  void set(int64_t row, int column, float value) const { data[row * stride + column] = store(value); }
};

// `dbias` is the gradient of a bias in fp32, in the place of each of its elements in memory.
void head(const bwdtune_arguments& a, int64_t sequence, int64_t head_kv, std::vector<float>& dbias) {
  const int64_t group = a.heads_q / a.heads_kv, batch = VARLEN ? 0 : sequence;
  const int64_t first_q = VARLEN ? a.cu_seqlens_q[sequence] : 0, first_kv = VARLEN ? a.cu_seqlens_kv[sequence] : 0;
  const int64_t sq = VARLEN ? a.cu_seqlens_q[sequence + 1] - first_q : a.seqlen_q;
  const int64_t skv = VARLEN ? a.cu_seqlens_kv[sequence + 1] - first_kv : a.seqlen_kv;
  const int64_t diagonal = BOTTOM_RIGHT ? skv - sq : 0, rows = VARLEN ? a.positions_q : sq;
  const Rows dk(a.dk, batch, head_kv, first_kv), dv(a.dv, batch, head_kv, first_kv);
  const std::vector<float> k = Rows(a.k, batch, head_kv, first_kv).load(skv, HEAD_DIM);
  const std::vector<float> v = Rows(a.v, batch, head_kv, first_kv).load(skv, HEAD_DIM_V);
  std::vector<float> dk_sum(skv * HEAD_DIM), dv_sum(skv * HEAD_DIM_V), dq_row(HEAD_DIM);
  for (int64_t head_q = head_kv * group; head_q < (head_kv + 1) * group; head_q++) {
    bwdtune_tensor dout_layout = a.dout;
    if (FAULT == "FORGETS_STRIDES") {
      dout_layout.stride_seqlen = HEAD_DIM_V;
      dout_layout.stride_head = sq * HEAD_DIM_V;
      dout_layout.stride_batch = a.heads_q * sq * HEAD_DIM_V;
    }
    const Rows dq(a.dq, batch, head_q, first_q);
    const std::vector<float> q = Rows(a.q, batch, head_q, first_q).load(sq, HEAD_DIM);
    const std::vector<float> o = Rows(a.o, batch, head_q, first_q).load(sq, HEAD_DIM_V);
    const std::vector<float> dq_before = dq.load(sq, HEAD_DIM);
    const std::vector<float> dout = Rows(dout_layout, batch, head_q, first_q).load(sq, HEAD_DIM_V);
    const float* lse = a.lse + (batch * a.heads_q + head_q) * rows + first_q;
    for (int64_t i = 0; i < sq; i++) {
      const float *q_row = &q[i * HEAD_DIM], *dout_row = &dout[i * HEAD_DIM_V];
      float delta = 0;
      for (int d = 0; d < HEAD_DIM_V; d++) delta += o[i * HEAD_DIM_V + d] * dout_row[d];
      if (LSE_GRAD && std::isfinite(lse[i])) delta -= a.dlse[lse + i - a.lse];
      if (SINK && std::isfinite(lse[i])) a.dsink[head_q] -= std::exp(a.sink[head_q] - lse[i]) * delta;
      std::fill(dq_row.begin(), dq_row.end(), 0.f);
      int64_t begin = 0, end = skv;
      if (MASK == BWDTUNE_MASK_CAUSAL) end = std::min(i + diagonal + 1, skv);
      if (MASK == BWDTUNE_MASK_WINDOW && a.window_right >= 0) end = std::min(i + diagonal + a.window_right + 1, skv);
      if (MASK == BWDTUNE_MASK_WINDOW && a.window_left >= 0) begin = std::max<int64_t>(i + diagonal - a.window_left, 0);
      if (FAULT == "OTHER_MASK") end = MASK == BWDTUNE_MASK_CAUSAL ? std::min(end + 1, skv) : end - 1;
      for (int64_t j = begin; j < end; j++) {
        const float *k_row = &k[j * HEAD_DIM], *v_row = &v[j * HEAD_DIM_V];
        float s = 0, dp = 0;
        for (int d = 0; d < HEAD_DIM; d++) s += q_row[d] * k_row[d];
        for (int d = 0; d < HEAD_DIM_V; d++) dp += dout_row[d] * v_row[d];
        const float capped = SOFTCAP ? std::tanh(a.scale * s / a.softcap) : 0;
        float score = SOFTCAP ? a.softcap * capped : a.scale * s;
        const auto element = [&](const bwdtune_tensor& t) {
          return sequence * t.stride_batch + head_q * t.stride_head + i * t.stride_seqlen + j;
        };
        if (!BIAS.empty()) score += load_bias(a.bias, element(a.bias));
        if (ALIBI)
          score -= a.alibi_slopes[sequence * a.alibi_batch_stride + head_q] * static_cast<float>(std::abs(i + skv - sq - j));
        const float p = std::isfinite(lse[i]) ? std::exp(score - lse[i]) : 0;
        if (BIAS_GRAD) dbias[element(a.dbias)] += p * (dp - delta);
        const float ds = p * (dp - delta) * a.scale * (1 - capped * capped);
        const float ds_for_dq = FAULT == "FORGETS_THE_SCALE" ? ds / a.scale : ds;
        for (int d = 0; d < HEAD_DIM; d++) dq_row[d] += ds_for_dq * k_row[d];
        if (head_q % group && FAULT == "ONE_QUERY_HEAD") continue;
        for (int d = 0; d < HEAD_DIM; d++) dk_sum[j * HEAD_DIM + d] += ds * q_row[d];
        for (int d = 0; d < HEAD_DIM_V; d++) dv_sum[j * HEAD_DIM_V + d] += p * dout_row[d];
      }
      for (int d = 0; d < HEAD_DIM; d++)
        dq.set(i, d, dq_row[d] + (FAULT == "ACCUMULATES" ? dq_before[i * HEAD_DIM + d] : 0));
    }
    if (FAULT == "NAN_TAIL" && sq % 2) dq.set(sq - 1, 0, NAN);
  }
  const int64_t written = FAULT == "HALF_OF_THE_ROWS" ? (skv + 1) / 2 : skv;
  for (int64_t j = 0; j < written; j++) {
    for (int d = 0; d < HEAD_DIM; d++) dk.set(j, d, dk_sum[j * HEAD_DIM + d]);
    for (int d = 0; d < HEAD_DIM_V; d++) dv.set(j, d, dv_sum[j * HEAD_DIM_V + d]);
  }
  if (FAULT == "ONE_ELEMENT" && skv > 70) dv.set(70, 5, dv_sum[70 * HEAD_DIM_V + 5] * -1.5f);
  if (FAULT == "WRITES_PAST_THE_END" && batch == a.batch - 1 && head_kv == a.heads_kv - 1)
    for (int d = 0; d < HEAD_DIM; d++) dk.set(skv, d, 1);
}

}  // namespace

extern "C" {

int64_t bwdtune_workspace_bytes(const bwdtune_arguments* a) {
  if (a->struct_bytes != sizeof(bwdtune_arguments)) return -1;
  if (a->seqlen_q > 1 << 20) return -8;
  return (VARLEN ? a->positions_q : a->batch * a->seqlen_q) * a->heads_q * (HEAD_DIM + 2) * 4;
}

int bwdtune_backward(const bwdtune_arguments* a) {
  if (a->struct_bytes != sizeof(bwdtune_arguments)) return -1;
  for (const bwdtune_tensor* t : {&a->q, &a->k, &a->v, &a->o, &a->dout, &a->dq, &a->dk, &a->dv}) {
    const bool aligned = (reinterpret_cast<uintptr_t>(t->data) | t->stride_batch * 2 | t->stride_head * 2 | t->stride_seqlen * 2) % 16 == 0;
    if (!aligned || t->stride_batch <= 0 || t->stride_head <= 0 || t->stride_seqlen <= 0) return -5;
  }
  if (a->workspace_bytes < bwdtune_workspace_bytes(a)) return -7;
  if (FAULT == "SEGFAULT") *reinterpret_cast<volatile int*>(8) = 1;
  if (FAULT == "ABORTS") std::abort();
  for (volatile bool endless = FAULT == "ENDLESS"; endless;) {}  // it takes CPU time, as a test looks for
  if (FAULT == "ERROR_CODE") return 719;
  if (FAULT == "CHANGES_AN_INPUT") static_cast<uint16_t*>(a->k.data)[0] ^= 0x8000;
  for (int64_t head_q = 0; VARLEN && head_q < a->heads_q; head_q++)  // rows that are in no sequence too
    for (int64_t i = 0; i < a->positions_q; i++)
      for (int d = 0; d < HEAD_DIM; d++) Rows(a->dq, 0, head_q).set(i, d, 0);
  if (SINK) std::fill(a->dsink, a->dsink + a->heads_q, 0.f);
  std::vector<float> dbias;
  if (BIAS_GRAD) {  // which is dense
    dbias.resize((BIAS[0] == 'B' ? a->batch : 1) * (BIAS[2] == 'H' ? a->heads_q : 1) *
                 (BIAS[4] == 'S' ? a->seqlen_q : 1) * a->seqlen_kv);
  }
  for (int64_t batch = 0; batch < a->batch; batch++)
    for (int64_t head_kv = 0; head_kv < a->heads_kv; head_kv++) head(*a, batch, head_kv, dbias);
  for (size_t i = 0; i < dbias.size(); i++) store_bias(a->dbias, static_cast<int64_t>(i), dbias[i]);
  if (FAULT == "READS_THE_WORKSPACE") {
    uint16_t* dq = static_cast<uint16_t*>(a->dq.data);
    *dq = store(load(*dq) + *static_cast<float*>(a->workspace));
  }
  return 0;
}

const char* bwdtune_error_text(int code) {
  switch (code) {
    case -1: return "struct_bytes is not this library's";
    case -5: return "a base or stride is not a multiple of 16 bytes";
    case -7: return "the workspace is too small";
    case -8: return "a size is too large";
    default: return "unspecified launch failure";
  }
}

int bwdtune_get_info(bwdtune_info* info) {
  if (info->struct_bytes != sizeof(bwdtune_info)) return -1;
  info->abi_version = ABI_VERSION;
  info->head_dim = HEAD_DIM;
  info->head_dim_v = HEAD_DIM_V;
  info->mask = MASK;
  info->bottom_right = BOTTOM_RIGHT;
  info->softcap = SOFTCAP;
  info->varlen = VARLEN;
  info->deterministic = DETERMINISTIC;
  info->lse_grad = LSE_GRAD;
  info->sink = SINK;
  info->alibi = ALIBI;
  info->bias_grad = BIAS_GRAD;
  info->writes_all_rows = !VARLEN;
  info->threads = 128;
  info->shared_memory_bytes = 81920;
  info->dtype = BF16 ? "bf16" : "fp16";
  info->config = "stub";
  info->bias = BIAS.c_str();
  info->bias_dtype = BIAS_DTYPE.c_str();
  return 0;
}
}
