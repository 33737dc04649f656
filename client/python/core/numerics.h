// ballast._core's part for ballast.numerics: the registry of kernels/ as it is, one function each. Memory is given as
// addresses and stays the caller's; sizes and dtypes are ballast.numerics' business.
#pragma once

#include <nanobind/nanobind.h>

namespace ballast {

void BindNumerics(nanobind::module_& module);

}  // namespace ballast
