/*
 * Recordings of whole steps, and marks in the stream. The first run of a number of rows is an
 * ordinary one: libraries load their kernels and choose their algorithms then, which they may not
 * do while recording.
 */
#include "kernels/layers/model_internal.h"

bool sl_model_records(const sl_model_t *model)
{
    return model->ops->graph_begin != NULL;
}

static sl_recording_t *find(sl_model_t *model)
{
    for (uint32_t i = 0; i < model->recording_count; i++) {
        sl_recording_t *recording = &model->recordings[i];
        if (recording->rows == model->batch.rows) {
            return recording;
        }
    }
    return NULL;
}

sl_status_t sl_model_record_begin(sl_model_t *model, bool *issue_p)
{
    SL_ASSERT(model->recording == NULL);
    *issue_p = true;
    if (!sl_model_records(model)) {
        return SL_OK;
    }
    sl_recording_t *recording = find(model);
    if (recording == NULL) {
        if (model->recording_count < SL_RECORDINGS_MAX) {
            model->recordings[model->recording_count++] =
                (sl_recording_t){.rows = model->batch.rows};
        }
        return SL_OK;
    }
    if (recording->graph != NULL) {
        *issue_p = false;
        return model->ops->graph_launch(model->device, model->stream, recording->graph);
    }
    model->recording = recording;
    return model->ops->graph_begin(model->device, model->stream);
}

sl_status_t sl_model_record_end(sl_model_t *model)
{
    sl_recording_t *recording = model->recording;
    if (recording == NULL) {
        return SL_OK;
    }
    model->recording = NULL;
    SL_TRY(model->ops->graph_end(model->device, model->stream, &recording->graph));
    return model->ops->graph_launch(model->device, model->stream, recording->graph);
}

sl_status_t sl_model_mark(sl_model_t *model, uint32_t mark)
{
    return model->ops->mark(model->device, model->stream, mark);
}

sl_status_t sl_model_wait_mark(sl_model_t *model, uint32_t mark)
{
    return model->ops->wait_mark(model->device, mark);
}
