// What ballast._core.Client does for a trainer: attaching to a run, its weights, and its steps. Memory is the caller's
// (memory.h): gradients are read before a call returns, weights are written until a tensor is bound elsewhere.
#pragma once

#include <nanobind/nanobind.h>

#include "client/python/core/py_client.h"

namespace ballast {

void BindTrainer(nanobind::class_<PyClient>& client);

}  // namespace ballast
