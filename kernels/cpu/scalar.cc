// The scalar vector type: the reference, for any processor of the target.
#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {

const IsaTables& ScalarTables() {
  static constexpr IsaTables kTables = MakeTables<ScalarVector>("scalar");
  return kTables;
}

}  // namespace ballast::kernels
