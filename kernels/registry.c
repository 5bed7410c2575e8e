/* The backends of this build. The only file that knows at compile time which there are. */
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/ops.h"
#include "kernels/ref/ref.h"

#ifdef SLUICE_HAVE_CUDA
#include "kernels/cuda/cuda.h"
#define BACKEND_NAMES "ref, cpu, cuda"
#else
#define BACKEND_NAMES "ref, cpu"
#endif

static const sl_ops_t *const backends[] = {
    &sl_ref_ops,
    &sl_cpu_ops,
#ifdef SLUICE_HAVE_CUDA
    &sl_cuda_ops,
#endif
};

sl_status_t sl_ops_find(const char *name, const sl_ops_t **ops_p)
{
    for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++) {
        if (strcmp(backends[i]->name, name) == 0) {
            *ops_p = backends[i];
            return SL_OK;
        }
    }
    return sl_error(SL_ERR_UNSUPPORTED, "no device backend \"%s\" in this build; it has %s", name,
                    BACKEND_NAMES);
}
