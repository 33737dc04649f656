// The scalar lane again, compiled with -mavx2 -mfma: its loops then take eight elements at a time and fma is one
// instruction. Nothing of this unit may run before UsableLanes() has looked at the processor.
#include "kernels/cpu_tables.h"
#include "kernels/lanes/tables.h"

namespace ballast::kernels {

const LaneTables& ScalarForAvx2Tables() {
  static constexpr LaneTables kTables = {
      "scalar, compiled for avx2", kKernels, kMasters, kWires, kRuleNames, kStateNames};
  return kTables;
}

}  // namespace ballast::kernels
