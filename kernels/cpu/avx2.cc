// The AVX2 vector type. Nothing of this unit may run before UsableIsas() has looked at the processor.
#include "kernels/simd/avx2.h"

#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {

const IsaTables& Avx2Tables() {
  static constexpr IsaTables kTables = MakeTables<Avx2Vector>("avx2");
  return kTables;
}

}  // namespace ballast::kernels
