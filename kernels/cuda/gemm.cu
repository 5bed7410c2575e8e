/*
 * Dense products through cuBLASLt: one per call (linear) or one per head (head_linear).
 *
 * cuBLASLt thinks in columns. Seen so, the row-major matrices are already its operands:
 *
 *    out^T (n x rows, a column every out_stride) = w (k x n, transposed) . x (k x rows, x_stride)
 *
 * Heads are a batch of such products, matrix_stride apart; their outputs interleave in memory where
 * a token's heads lie next to each other, and never overlap.
 *
 * Sums are f32 throughout: reductions of split K in bf16 are forbidden, which is what cuBLAS would
 * otherwise do for some shapes.
 *
 * The algorithm for a shape is asked for once and kept in a table of the calling thread: the engine
 * thread, so no lock; a slot is overwritten when another shape falls on it, so no growth. Asking is
 * host work only, but launching an algorithm for the first time may load its code: run a shape once
 * before it is captured in a graph. The stream's workspace is passed with each call and is fixed.
 *
 * What cuBLASLt has no algorithm for (odd strides, overlapping rows) goes to plain.cu.
 */
#include "kernels/cuda/cuda.h"

#include <cublasLt.h>

#include "kernels/cuda/plain.h"

#define CACHE_SLOTS 512u /* a power of two */
#define ALIGNMENT_MAX 256u

/* What an algorithm is chosen by. Compared as bytes: no padding in it. */
typedef struct {
    uint64_t x_matrix_stride, out_matrix_stride; /* 0 if there is one matrix */
    uint64_t x_row_stride, out_row_stride;
    uint32_t rows, n, k, matrices;
    uint32_t x_align, w_align, out_align; /* bytes */
    uint32_t out_f32;
    int32_t device;
    uint32_t used; /* 1 in a key; a slot never used is all zeros */
} shape_t;
static_assert(sizeof(shape_t) == 72, "padding in a key");

typedef struct {
    shape_t shape;
    bool found; /* or cuBLASLt has none */
    cublasLtMatmulAlgo_t algorithm;
} cached_t;

/* cuBLASLt's view of one product; lives on the stack. */
typedef struct {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w, x, out;
} layout_t;

static thread_local cached_t cache[CACHE_SLOTS];

/* Of the first element of every matrix, `stride_bytes` apart. */
static uint32_t alignment(const void *pointer, uint64_t stride_bytes)
{
    uint64_t bits = (uint64_t)(uintptr_t)pointer | stride_bytes;
    uint64_t lowest_bit = bits & (~bits + 1);
    return lowest_bit == 0 || lowest_bit > ALIGNMENT_MAX ? ALIGNMENT_MAX : (uint32_t)lowest_bit;
}

static uint32_t slot_of(const shape_t *shape)
{
    uint32_t words[sizeof(*shape) / sizeof(uint32_t)];
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a over words, then the well mixed high bits */
    memcpy(words, shape, sizeof(words));
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        hash = (hash ^ words[i]) * 0x100000001b3u;
    }
    return (uint32_t)(hash >> 40 ^ hash >> 20) & (CACHE_SLOTS - 1);
}

static cublasStatus_t describe_matrix(cublasLtMatrixLayoutOpaque_t *layout, cudaDataType type,
                                      uint64_t rows, uint64_t columns, uint64_t stride,
                                      uint32_t matrices, uint64_t matrix_stride)
{
    const int32_t count = (int32_t)matrices;
    const int64_t offset = (int64_t)matrix_stride;
    cublasStatus_t status = cublasLtMatrixLayoutInit(layout, type, rows, columns, (int64_t)stride);
    if (status == CUBLAS_STATUS_SUCCESS && matrices > 1) {
        status = cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                  &count, sizeof(count));
    }
    if (status == CUBLAS_STATUS_SUCCESS && matrices > 1) {
        status = cublasLtMatrixLayoutSetAttribute(
            layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset, sizeof(offset));
    }
    return status;
}

static sl_status_t describe(const shape_t *shape, const char *what, layout_t *layout)
{
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const cudaDataType out_type = shape->out_f32 ? CUDA_R_32F : CUDA_R_16BF;
    SL_CUBLAS_TRY(cublasLtMatmulDescInit(&layout->product, CUBLAS_COMPUTE_32F, CUDA_R_32F), what);
    SL_CUBLAS_TRY(cublasLtMatmulDescSetAttribute(&layout->product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                 &transposed, sizeof(transposed)),
                  what);
    SL_CUBLAS_TRY(describe_matrix(&layout->w, CUDA_R_16BF, shape->k, shape->n, shape->k,
                                  shape->matrices, (uint64_t)shape->n * shape->k),
                  what);
    SL_CUBLAS_TRY(describe_matrix(&layout->x, CUDA_R_16BF, shape->k, shape->rows,
                                  shape->x_row_stride, shape->matrices, shape->x_matrix_stride),
                  what);
    return sl_cublas_check(describe_matrix(&layout->out, out_type, shape->n, shape->rows,
                                           shape->out_row_stride, shape->matrices,
                                           shape->out_matrix_stride),
                           what);
}

static cublasStatus_t prefer(cublasLtMatmulPreferenceOpaque_t *preference,
                             cublasLtMatmulPreferenceAttributes_t attribute, uint32_t value)
{
    return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
}

static cublasStatus_t make_preference(const shape_t *shape,
                                      cublasLtMatmulPreferenceOpaque_t *preference)
{
    const uint64_t workspace_bytes = SL_CUDA_CUBLAS_WORKSPACE_BYTES;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t value;
    } wanted[] = {
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, shape->w_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape->x_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape->out_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape->out_align},
    };
    cublasStatus_t status = cublasLtMatmulPreferenceInit(preference);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulPreferenceSetAttribute(preference,
                                                      CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &workspace_bytes, sizeof(workspace_bytes));
    }
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        if (status == CUBLAS_STATUS_SUCCESS) {
            status = prefer(preference, wanted[i].attribute, wanted[i].value);
        }
    }
    return status;
}

/* The shape's algorithm, from the table or asked for now. */
static sl_status_t find_algorithm(cublasLtHandle_t handle, const shape_t *shape,
                                  const layout_t *layout, const char *what,
                                  const cached_t **cached_p)
{
    cached_t *cached = &cache[slot_of(shape)];
    if (memcmp(&cached->shape, shape, sizeof(*shape)) == 0) {
        *cached_p = cached;
        return SL_OK;
    }
    cublasLtMatmulPreferenceOpaque_t preference;
    SL_CUBLAS_TRY(make_preference(shape, &preference), what);
    cublasLtMatmulHeuristicResult_t result;
    memset(&result, 0, sizeof(result));
    int count = 0;
    /* The descriptors are read only, whatever their types say. */
    layout_t copy = *layout;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, &copy.product, &copy.w, &copy.x, &copy.out,
                                       &copy.out, &preference, 1, &result, &count);
    bool none = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    if (!none) {
        SL_CUBLAS_TRY(status, what);
    }
    cached->shape = *shape;
    cached->found = !none && count > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    cached->algorithm = result.algo;
    *cached_p = cached;
    return SL_OK;
}

static shape_t shape_of(const sl_device_t *device, const sl_plain_product_t *p)
{
    shape_t shape;
    memset(&shape, 0, sizeof(shape));
    shape.rows = p->rows;
    shape.n = p->n;
    shape.k = p->k;
    shape.matrices = p->matrices;
    /* A single row may come with any stride; cuBLASLt wants one that a whole row fits in. */
    shape.x_row_stride = p->rows > 1 ? p->x_row_stride : p->k;
    shape.out_row_stride = p->rows > 1 ? p->out_row_stride : p->n;
    shape.x_matrix_stride = p->matrices > 1 ? p->x_matrix_stride : 0;
    shape.out_matrix_stride = p->matrices > 1 ? p->out_matrix_stride : 0;
    shape.x_align = alignment(p->x, shape.x_matrix_stride * 2);
    shape.w_align = alignment(p->w, p->matrices > 1 ? (uint64_t)p->n * p->k * 2 : 0);
    shape.out_align = alignment(p->out, shape.out_matrix_stride * (p->out_f32 ? 4 : 2));
    shape.out_f32 = p->out_f32;
    shape.device = device->index;
    shape.used = 1;
    return shape;
}

/* cuBLASLt's way if it has one for the shape, else ours. */
static sl_status_t product(sl_device_t *device, sl_stream_t *stream, const sl_plain_product_t *p,
                           const char *what)
{
    cudaStream_t on = sl_cuda_enter(device, stream);
    const shape_t shape = shape_of(device, p);
    if (shape.x_row_stride < p->k || shape.out_row_stride < p->n) {
        return sl_cuda_plain_product(on, p, what);
    }
    sl_cuda_context_t *context;
    cublasHandle_t cublas;
    layout_t layout;
    const cached_t *cached;
    SL_TRY(sl_cuda_cublas(device, stream, &cublas)); /* also makes the workspace */
    SL_TRY(sl_cuda_context(device, stream, &context));
    SL_TRY(describe(&shape, what, &layout));
    SL_TRY(find_algorithm((cublasLtHandle_t)cublas, &shape, &layout, what, &cached));
    if (!cached->found) {
        return sl_cuda_plain_product(on, p, what);
    }
    const float one = 1, zero = 0;
    return sl_cublas_check(cublasLtMatmul((cublasLtHandle_t)cublas, &layout.product, &one, p->w,
                                          &layout.w, p->x, &layout.x, &zero, p->out, &layout.out,
                                          p->out, &layout.out, &cached->algorithm,
                                          context->workspace, SL_CUDA_CUBLAS_WORKSPACE_BYTES, on),
                           what);
}

sl_status_t sl_cuda_linear(sl_device_t *device, sl_stream_t *stream, const sl_linear_t *p)
{
    if (p->rows == 0) {
        return SL_OK;
    }
    SL_ASSERT(p->n > 0 && p->k > 0);
    sl_plain_product_t one = {};
    one.out = p->out;
    one.x = p->x;
    one.w = p->w;
    one.rows = p->rows;
    one.matrices = 1;
    one.n = p->n;
    one.k = p->k;
    one.x_row_stride = p->x_stride != 0 ? p->x_stride : p->k;
    one.out_row_stride = p->out_stride != 0 ? p->out_stride : p->n;
    one.out_f32 = p->out_f32;
    return product(device, stream, &one, "linear");
}

sl_status_t sl_cuda_head_linear(sl_device_t *device, sl_stream_t *stream, const sl_head_linear_t *p)
{
    if (p->rows == 0 || p->heads == 0) {
        return SL_OK;
    }
    SL_ASSERT(p->n > 0 && p->k > 0);
    sl_plain_product_t heads = {};
    heads.out = p->out;
    heads.x = p->x;
    heads.w = p->w;
    heads.rows = p->rows;
    heads.matrices = p->heads;
    heads.n = p->n;
    heads.k = p->k;
    heads.x_row_stride = p->x_row_stride;
    heads.x_matrix_stride = p->x_head_stride;
    heads.out_row_stride = p->out_row_stride;
    heads.out_matrix_stride = p->out_head_stride;
    return product(device, stream, &heads, "head_linear");
}
