// Every kernel once more, compiled without optimisation (unoptimized_kernels.cc).
#pragma once

#include "kernels/cpu/tables.h"

namespace ballast::kernels {

const IsaTables& UnoptimizedTables();

}  // namespace ballast::kernels
