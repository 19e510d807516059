// Calls an exported kernel from plain C++, on tensors that lie as a model has them: (batch, seqlen, 3, heads, head_dim), with
// q, k and v side by side.
//
// All queries and keys are zero, so each query attends to every key it sees alike, and the answer is known without a
// reference: with dO = 1, dV of a key is the sum of 1 / (number of keys seen) over the queries that see it.
#include "bwdtune_backward.h"

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kSeqlen = 200;
constexpr uint16_t kOne = 0x3f80;  // 1.0 in bf16

float to_float(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

void check(int code, const char* what) {
    if (code == 0) return;
    std::fprintf(stderr, "%s: %s\n", what, bwdtune_error_text(code));
    std::exit(1);
}

template <typename T>
T* on_device(const std::vector<T>& values) {
    void* data = nullptr;
    check(cudaMalloc(&data, values.size() * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return static_cast<T*>(data);
}

}  // namespace

int main() {
    bwdtune_info info{};
    info.struct_bytes = sizeof info;
    check(bwdtune_get_info(&info), "bwdtune_get_info");
    std::printf("%s, %s, head_dim %d\n", info.config, info.dtype, info.head_dim);
    if (std::strcmp(info.dtype, "bf16") != 0 || info.mask == BWDTUNE_MASK_WINDOW || info.varlen) {
        std::fprintf(stderr, "this example takes a bf16 kernel with a full or a causal mask\n");
        return 2;
    }
    const bool causal = info.mask == BWDTUNE_MASK_CAUSAL;

    const int64_t row = kHeads * info.head_dim, rows = kBatch * kSeqlen;
    uint16_t* qkv = on_device(std::vector<uint16_t>(3 * rows * row, 0));
    uint16_t* gradients = on_device(std::vector<uint16_t>(3 * rows * row, 0));
    uint16_t* output = on_device(std::vector<uint16_t>(rows * row, 0));
    uint16_t* doutput = on_device(std::vector<uint16_t>(rows * row, kOne));
    std::vector<float> log_sum_exp;
    for (int64_t head = 0; head < kBatch * kHeads; ++head)
        for (int64_t query = 0; query < kSeqlen; ++query)
            log_sum_exp.push_back(std::log(static_cast<float>(causal ? query + 1 : kSeqlen)));
    float* lse = on_device(log_sum_exp);

    // Strides count elements. One of q, k and v is a third of a row of `qkv`.
    const auto packed = [&](uint16_t* data, int64_t which) {
        return bwdtune_tensor{data + which * row, kSeqlen * 3 * row, info.head_dim, 3 * row};
    };
    const auto plain = [&](uint16_t* data) {
        return bwdtune_tensor{data, kSeqlen * row, info.head_dim, row};
    };
    bwdtune_arguments arguments{};
    arguments.struct_bytes = sizeof arguments;
    arguments.q = packed(qkv, 0), arguments.k = packed(qkv, 1), arguments.v = packed(qkv, 2);
    arguments.dq = packed(gradients, 0), arguments.dk = packed(gradients, 1), arguments.dv = packed(gradients, 2);
    arguments.o = plain(output), arguments.dout = plain(doutput);
    arguments.lse = lse;
    arguments.batch = kBatch;
    arguments.heads_q = arguments.heads_kv = kHeads;
    arguments.seqlen_q = arguments.seqlen_kv = kSeqlen;
    arguments.scale = 1 / std::sqrt(static_cast<float>(info.head_dim));
    arguments.softcap = 1;  // read only by a kernel with a softcap; zero scores stay zero

    arguments.workspace_bytes = bwdtune_workspace_bytes(&arguments);
    if (arguments.workspace_bytes < 0) check(static_cast<int>(arguments.workspace_bytes), "bwdtune_workspace_bytes");
    check(cudaMalloc(&arguments.workspace, arguments.workspace_bytes), "cudaMalloc");

    check(bwdtune_backward(&arguments), "bwdtune_backward");  // only enqueued: on the default stream here
    check(cudaDeviceSynchronize(), "the kernel");

    std::vector<uint16_t> found(3 * rows * row);
    check(cudaMemcpy(found.data(), gradients, found.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost), "cudaMemcpy");
    double worst = 0;
    for (int64_t key = 0; key < kSeqlen; ++key) {
        double expected = 0;
        for (int64_t query = causal ? key : 0; query < kSeqlen; ++query)
            expected += 1.0 / static_cast<double>(causal ? query + 1 : kSeqlen);
        const float dv = to_float(found[(key * 3 + 2) * row]);  // of the first head of the first batch
        worst = std::fmax(worst, std::fabs(dv - expected) / expected);
    }
    std::printf("largest relative error of dV: %.4f\n", worst);
    return worst < 0.01 ? 0 : 1;
}
