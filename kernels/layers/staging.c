/*
 * A step's arrays on their way to the device, and what it chose on its way back.
 *
 * The arrays lie behind one another, so that they travel as one copy. Where each lies follows from
 * the number of rows alone (the pages, whose number varies, come last), so a recording of a step of
 * that size finds them again. Both ways go through memory of the kind that copies read and write by
 * themselves, twice over: the host fills one while the device works from the other.
 */
#include <string.h>

#include "kernels/layers/model_internal.h"

#define ALIGNMENT 256u
#define ARRAYS_MAX 12u

/* The model's own marks, behind those of its callers; one for each side. */
#define MARK_SENT SL_MODEL_MARKS_MAX
#define MARK_FETCHED (SL_MODEL_MARKS_MAX + SL_SIDES)

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

size_t sl_model_inputs_bytes(const sl_model_t *model)
{
    size_t rows = model->params.max_rows;
    size_t a_row = 6 * sizeof(int32_t) + sizeof(int64_t);
    size_t rules = rows < model->params.max_logit_rows ? rows : model->params.max_logit_rows;
    return rows * a_row + model->gathered_max + rules * sizeof(sl_sample_row_t) +
           (size_t)model->max_pages * sizeof(int32_t) + ARRAYS_MAX * ALIGNMENT;
}

static sl_status_t take_side(sl_model_t *model, sl_side_t *side)
{
    const sl_ops_t *ops = model->ops;
    size_t rows = model->params.max_logit_rows;
    SL_TRY(ops->alloc_host(model->device, model->inputs_bytes, "step arrays", &side->inputs));
    SL_TRY(ops->alloc_host(model->device, rows * sizeof(int32_t), "tokens", &side->tokens));
    return ops->alloc_host(model->device, rows * sizeof(sl_logprobs_t), "logprobs",
                           &side->logprobs);
}

sl_status_t sl_model_take_staging(sl_model_t *model)
{
    SL_TRY(model->ops->alloc_host(model->device,
                                  model->params.max_logit_rows * sizeof(sl_sample_row_t),
                                  "sampling rules", &model->host_rules));
    for (uint32_t i = 0; i < SL_SIDES; i++) {
        SL_TRY(take_side(model, &model->sides[i]));
    }
    return SL_OK;
}

static void give_back(sl_model_t *model, void *memory)
{
    if (memory != NULL) {
        model->ops->free_host(model->device, memory);
    }
}

void sl_model_free_staging(sl_model_t *model)
{
    give_back(model, model->host_rules);
    for (uint32_t i = 0; i < SL_SIDES; i++) {
        give_back(model, model->sides[i].inputs);
        give_back(model, model->sides[i].tokens);
        give_back(model, model->sides[i].logprobs);
    }
}

typedef struct {
    char *host, *device;
    size_t used;
} packer_t;

/* The next array: its place in host memory is returned, that on the device set. */
static void *pack(packer_t *packer, size_t bytes, void *device_p)
{
    void *host = packer->host + packer->used, *device = packer->device + packer->used;
    memcpy(device_p, &device, sizeof(device));
    packer->used += aligned(bytes);
    return host;
}

static void pack_copy(packer_t *packer, const void *from, size_t bytes, void *device_p)
{
    memcpy(pack(packer, bytes, device_p), from, bytes);
}

/* What the operations want a row at a time: its request, and how many cached tokens it sees. */
static void derive_rows(const sl_batch_t *batch, int32_t *row_request, int32_t *kv_len)
{
    for (uint32_t r = 0; r < batch->requests; r++) {
        for (int32_t row = batch->row_begin[r]; row < batch->row_begin[r + 1]; row++) {
            row_request[row] = (int32_t)r;
            kv_len[row] = batch->positions[row] + 1;
        }
    }
    for (uint32_t row = (uint32_t)batch->row_begin[batch->requests]; row < batch->rows; row++) {
        row_request[row] = 0;
        kv_len[row] = 0;
    }
}

/* Which rows of the MLPs' input are real: own ones, or the group's one rank after the other. */
static void pack_valid(const sl_model_t *model, packer_t *packer, uint8_t **device_p)
{
    const sl_batch_t *batch = &model->batch;
    bool gathers = model->params.attention == SL_ATTENTION_DP;
    uint32_t first = gathers ? 0 : model->params.rank;
    uint32_t last = gathers ? model->params.tp : first + 1;
    uint32_t rows = 0, row = 0;
    for (uint32_t r = first; r < last; r++) {
        rows += batch->rank_rows[r];
    }
    uint8_t *valid = pack(packer, rows, device_p);
    for (uint32_t r = first; r < last; r++) {
        for (uint32_t i = 0; i < batch->rank_rows[r]; i++) {
            valid[row++] = i < batch->rank_valid[r];
        }
    }
}

static size_t pack_batch(sl_model_t *model, void *host)
{
    const sl_batch_t *batch = &model->batch;
    sl_workspace_t *work = &model->work;
    packer_t packer = {host, work->inputs, 0};
    size_t rows = batch->rows, words = rows * sizeof(int32_t);
    size_t begin_words = ((size_t)batch->requests + 1) * sizeof(int32_t);
    pack_copy(&packer, batch->tokens, words, &work->tokens);
    pack_copy(&packer, batch->positions, words, &work->positions);
    pack_copy(&packer, batch->slots, rows * sizeof(int64_t), &work->slots);
    int32_t *row_request = pack(&packer, words, &work->row_request);
    int32_t *kv_len = pack(&packer, words, &work->kv_len);
    derive_rows(batch, row_request, kv_len);
    /* No more requests than rows. */
    memcpy(pack(&packer, words + sizeof(int32_t), &work->row_begin), batch->row_begin, begin_words);
    memcpy(pack(&packer, words + sizeof(int32_t), &work->page_begin), batch->page_begin,
           begin_words);
    if (batch->rank_valid != NULL) {
        pack_valid(model, &packer, &work->row_valid);
    }
    if (batch->rules != NULL) {
        pack_copy(&packer, batch->rules, rows * sizeof(*batch->rules), &work->rules);
    }
    uint32_t pages = (uint32_t)batch->page_begin[batch->requests];
    SL_ASSERT(pages <= model->max_pages);
    pack_copy(&packer, batch->pages, pages * sizeof(int32_t), &work->pages);
    SL_ASSERT(packer.used <= model->inputs_bytes);
    return packer.used;
}

sl_status_t sl_model_send_batch(sl_model_t *model)
{
    const sl_ops_t *ops = model->ops;
    uint32_t at = model->next_side;
    sl_side_t *side = &model->sides[at];
    model->next_side = (at + 1) % SL_SIDES;
    if (side->sent) {
        SL_TRY(ops->wait_mark(model->device, MARK_SENT + at));
    }
    size_t bytes = pack_batch(model, side->inputs);
    SL_TRY(ops->upload(model->device, model->stream, model->work.inputs, side->inputs, bytes));
    side->sent = true;
    return ops->mark(model->device, model->stream, MARK_SENT + at);
}

sl_status_t sl_model_fetch(sl_model_t *model, uint32_t count, bool logprobs)
{
    const sl_ops_t *ops = model->ops;
    const sl_workspace_t *work = &model->work;
    SL_ASSERT(model->fetches < SL_SIDES && count <= model->params.max_logit_rows);
    uint32_t at = (model->first_fetch + model->fetches) % SL_SIDES;
    const sl_side_t *side = &model->sides[at];
    model->fetches++;
    SL_TRY(ops->download(model->device, model->stream, side->tokens, work->sampled,
                         count * sizeof(int32_t)));
    if (logprobs) {
        SL_TRY(ops->download(model->device, model->stream, side->logprobs, work->logprobs,
                             count * sizeof(sl_logprobs_t)));
    }
    return ops->mark(model->device, model->stream, MARK_FETCHED + at);
}

sl_status_t sl_model_fetched(sl_model_t *model, uint32_t count, int32_t *tokens,
                             sl_logprobs_t *logprobs)
{
    SL_ASSERT(model->fetches > 0);
    uint32_t at = model->first_fetch;
    const sl_side_t *side = &model->sides[at];
    SL_TRY(model->ops->wait_mark(model->device, MARK_FETCHED + at));
    memcpy(tokens, side->tokens, count * sizeof(*tokens));
    if (logprobs != NULL) {
        memcpy(logprobs, side->logprobs, count * sizeof(*logprobs));
    }
    model->first_fetch = (at + 1) % SL_SIDES;
    model->fetches--;
    return SL_OK;
}
