// What ballast._core.Client asks about the daemon and its runs. A spec comes as Protobuf's JSON; answers go as
// dictionaries.
#pragma once

#include <nanobind/nanobind.h>

#include "client/python/core/py_client.h"

namespace ballast {

void BindRuns(nanobind::class_<PyClient>& client);

}  // namespace ballast
