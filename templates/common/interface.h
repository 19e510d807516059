/* The C interface of a generated attention backward: fill bwdtune_arguments, call bwdtune_backward.
 *
 * With P = softmax(scale * q k^T + mask) and o = P v, it computes dq, dk and dv from q, k, v, o, dout and the
 * log-sum-exp of the forward pass. With a cap, softcap * tanh(scale * q k^T / softcap) replaces scale * q k^T. A query
 * that sees no key has a gradient of zero and adds nothing. It allocates nothing and synchronises nothing: everything is
 * enqueued on `stream`, so it may be captured into a CUDA graph.
 *
 * With a sink, each query head has one more score, `sink`, in the softmax of all of its rows, whose probability goes to no
 * value: the log-sum-exp counts it, and its gradient is dsink = -sum over rows of exp(sink - lse) delta, with delta =
 * rowsum(dout o). With a gradient of the log-sum-exp, dlse, delta is lessened by it. */
#ifndef BWDTUNE_INTERFACE_H
#define BWDTUNE_INTERFACE_H

#include <stdint.h>

#define BWDTUNE_ABI_VERSION 6

/* The keys that a query sees. Query i lies at key i; in a library with `bottom_right` at key i + seqlen_kv - seqlen_q of its
 * sequence. */
#define BWDTUNE_MASK_FULL 0   /* all */
#define BWDTUNE_MASK_CAUSAL 1 /* those up to its own place */
#define BWDTUNE_MASK_WINDOW 2 /* window_left keys before its own place to window_right keys past it */

#if defined(_WIN32)
#define BWDTUNE_EXPORT __declspec(dllexport)
#else
#define BWDTUNE_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A (batch, head, seqlen, head_dim) tensor in device memory. Strides count elements, that of a row's is 1. The base and
 * all strides are multiples of 16 bytes (TMA's rule); the stride of a dimension of size 1 is ignored. */
typedef struct bwdtune_tensor {
  void* data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_seqlen;
} bwdtune_tensor;

typedef struct bwdtune_arguments {
  int64_t struct_bytes;        /* sizeof(bwdtune_arguments) */
  bwdtune_tensor q, o, dout;   /* read: (batch, heads_q, seqlen_q, head_dim), head_dim_v for o and dout */
  bwdtune_tensor k, v;         /* read: (batch, heads_kv, seqlen_kv, head_dim), head_dim_v for v */
  bwdtune_tensor dq;           /* written: as q */
  bwdtune_tensor dk, dv;       /* written: as k, and as v */
  const float* lse;            /* read: (batch, heads_q, seqlen_q), contiguous, natural logarithm */
  int64_t batch;               /* sizes are at least 1; with varlen: the number of sequences */
  int64_t heads_q;             /* a multiple of heads_kv */
  int64_t heads_kv;
  int64_t seqlen_q;            /* with varlen: of the longest sequence; an upper bound will do. Rows of q past it are left out,
                                  and have a dq of zero; keys past seqlen_kv may be */
  int64_t seqlen_kv;
  float scale;                 /* of q k^T in the softmax */
  int32_t device;              /* CUDA ordinal of the tensors; the caller's current device is left as it was */
  void* stream;                /* cudaStream_t of that device */
  void* workspace;             /* device memory, 16-byte aligned, of any content */
  int64_t workspace_bytes;     /* at least bwdtune_workspace_bytes() */
  int64_t window_left;         /* read by BWDTUNE_MASK_WINDOW: keys, or -1 for all */
  int64_t window_right;
  const int32_t* cu_seqlens_q; /* read with varlen, as the next three. Device memory, batch + 1 values: where each sequence
                                  begins in the rows of q, and one past the end of the last. The tensors are (1, heads,
                                  positions, head_dim), and lse (heads_q, positions_q). A sequence may have no rows; rows
                                  outside of all sequences get a dq of zero; their dk and dv: see writes_all_rows */
  const int32_t* cu_seqlens_kv;
  int64_t positions_q;         /* rows of q in all */
  int64_t positions_kv;        /* rows of k in all */
  float softcap;               /* read with softcap; positive */
  int32_t reserved;            /* 0 */
  const float* dlse;           /* read with lse_grad: as lse */
  const float* sink;           /* read with sink: (heads_q), natural logarithm as the scores; minus infinity is none */
  float* dsink;                /* written with sink: (heads_q) */
  bwdtune_tensor bias;         /* read with a bias, added to the scores after the cap and before the mask: (batch, heads_q,
                                  seqlen_q, seqlen_kv) of the library's bias_dtype. Strides count elements, that of the keys
                                  is 1, that of what it is broadcast over is ignored; any alignment will do */
  bwdtune_tensor dbias;        /* written with bias_grad: as bias. What it is broadcast over is summed up */
  const float* alibi_slopes;   /* read with alibi: (batch, heads_q); -slope * |i + seqlen_kv - seqlen_q - j| is added to the
                                  score of query i and key j of a sequence, where the bias is. The heads' stride is 1 */
  int64_t alibi_batch_stride;  /* 0: one slope for a head of all batches. With varlen a batch is a sequence */
} bwdtune_arguments;

typedef struct bwdtune_info {
  int64_t struct_bytes;        /* sizeof(bwdtune_info), set by the caller */
  int32_t abi_version;         /* BWDTUNE_ABI_VERSION of the library */
  int32_t head_dim;            /* of q and k */
  int32_t head_dim_v;          /* of v and o; in most libraries the same */
  int32_t mask;                /* BWDTUNE_MASK_... */
  int32_t bottom_right;        /* 1: where the mask is aligned, see above */
  int32_t softcap;             /* 1: scores are capped */
  int32_t varlen;              /* 1: sequences of several lengths, see cu_seqlens_q */
  int32_t deterministic;       /* 1: the same bits at each call; else dq's last ones may differ */
  int32_t lse_grad;            /* 1: reads dlse */
  int32_t sink;                /* 1: reads sink and writes dsink */
  int32_t alibi;               /* 1: reads alibi_slopes */
  int32_t bias_grad;           /* 1: writes dbias */
  int32_t writes_all_rows;     /* 1: rows outside of all sequences get a dk and a dv of zero; 0: these are left as they were */
  int32_t threads;             /* of a block of the main kernel */
  int64_t shared_memory_bytes; /* of a block of the main kernel */
  const char* dtype;           /* "bf16" or "fp16": q, k, v, o, dout and the gradients */
  const char* config;          /* the tuned configuration's id */
  const char* bias;            /* "" for none, or what of batch, heads and queries it is broadcast over: "1_H_S" */
  const char* bias_dtype;      /* "bf16", "fp16" or "fp32" of a bias */
} bwdtune_info;

/* Bytes of workspace for these sizes: fp32 dq and two floats a row (three with sink), in whole tiles; fp32 dk and dv where
 * several blocks add to them; counters; for a dbias that is summed up, fp32 sums, or with deterministic 16 bits for each score.
 * Negative: an error code. Reads the sizes, and `device` where its number of SMs matters. */
BWDTUNE_EXPORT int64_t bwdtune_workspace_bytes(const bwdtune_arguments* arguments);

/* Enqueues the backward. 0: enqueued; negative: refused before anything was launched; positive: a cudaError_t. */
BWDTUNE_EXPORT int bwdtune_backward(const bwdtune_arguments* arguments);

/* One line for an error code of the functions above. */
BWDTUNE_EXPORT const char* bwdtune_error_text(int code);

/* What this library computes. Fills the struct up to its struct_bytes; 0, or an error code. */
BWDTUNE_EXPORT int bwdtune_get_info(bwdtune_info* info);

#ifdef __cplusplus
}
#endif

#endif
