// The AVX2 lane. Nothing of this unit may run before UsableLanes() has looked at the processor.
#include "kernels/simd/avx2.h"

#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {

const LaneTables& Avx2Tables() {
  static constexpr LaneTables kTables = MakeTables<Avx2Lane>("avx2");
  return kTables;
}

}  // namespace ballast::kernels
