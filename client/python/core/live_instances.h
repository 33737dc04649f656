// Objects of a type, wherever in the process they are.
#pragma once

#include <nanobind/nanobind.h>

namespace ballast {

// Those that Python's garbage collector knows, of `kind` or a class of it. gc.get_objects() refers to all there are, also
// to a tuple that another thread is making at the time, whose next resize then fails ("bad argument to internal
// function"). So no Python code runs, in any thread, from that call until those references are gone.
nanobind::list LiveInstances(nanobind::type_object kind);

}  // namespace ballast
