// Compiled with -O0 -ffp-contract=off, in a namespace of its own.
#include "tests/kernels/cpu/unoptimized_kernels.h"

#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {

const IsaTables& UnoptimizedTables() {
  static constexpr IsaTables kTables = MakeTables<ScalarVector>("unoptimized");
  return kTables;
}

}  // namespace ballast::kernels
