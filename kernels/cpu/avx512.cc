// The AVX-512 vector type. Nothing of this unit may run before UsableIsas() has looked at the processor.
#include "kernels/simd/avx512.h"

#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {

const IsaTables& Avx512Tables() {
  static constexpr IsaTables kTables = MakeTables<Avx512Vector>("avx512");
  return kTables;
}

}  // namespace ballast::kernels
