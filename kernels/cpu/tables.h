// What each instruction set's unit makes of the lists in lists.h. All give the same bits; the registry
// takes the last usable one.
#pragma once

#include <span>

#include "kernels/registry.h"

namespace ballast::kernels {

struct IsaTables {
  const char* name;
  std::span<const Kernel> kernels;
  std::span<const MasterFormat> masters;
  std::span<const MomentFormat> states;
  std::span<const WireFormat> wires;
  std::span<const char* const> rules;
};

const IsaTables& ScalarTables();
const IsaTables& Avx2Tables();  // x86-64 builds only, and so is the next
const IsaTables& Avx512Tables();

// The instruction sets that this processor can run, the fastest last. Defined in choice_x86.cc or choice_other.cc, by
// the build's target.
std::span<const IsaTables* const> UsableIsas();

}  // namespace ballast::kernels
