// The AVX-512 lane. Nothing of this unit may run before UsableLanes() has looked at the processor.
#include "kernels/simd/avx512.h"

#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {

const LaneTables& Avx512Tables() {
  static constexpr LaneTables kTables = MakeTables<Avx512Lane>("avx512");
  return kTables;
}

}  // namespace ballast::kernels
