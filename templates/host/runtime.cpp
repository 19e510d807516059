// What instructions do, for all kernels that are compiled with BWDTUNE_HOST_LINKED and linked with this.
#include "ptx_host.hpp"
