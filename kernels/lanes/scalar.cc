// The scalar lane for any processor of the target.
#include "kernels/cpu_tables.h"
#include "kernels/lanes/tables.h"

namespace ballast::kernels {

const LaneTables& ScalarTables() {
  static constexpr LaneTables kTables = {"scalar", kKernels, kMasters, kWires, kRuleNames, kStateNames};
  return kTables;
}

}  // namespace ballast::kernels
