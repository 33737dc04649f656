// The scalar lane: the reference, for any processor of the target.
#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {

const LaneTables& ScalarTables() {
  static constexpr LaneTables kTables = MakeTables<ScalarLane>("scalar");
  return kTables;
}

}  // namespace ballast::kernels
