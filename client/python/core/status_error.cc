#include "client/python/core/status_error.h"

#include <nanobind/stl/string.h>

#include <string>

#include "client/python/core/interpreter_lock.h"

namespace ballast {
namespace {

namespace nb = nanobind;

void Translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const StatusError& error) {
    const std::string code = absl::StatusCodeToString(error.status().code());
    const std::string message(error.status().message());
    EndOfThread end;  // Python's code lets go of the lock now and then
    const nb::object exception = nb::module_::import_("ballast.errors").attr("from_status")(code, message);
    PyErr_SetObject(exception.type().ptr(), exception.ptr());
    end.Pass();
  }
}

}  // namespace

void RegisterStatusError() { nb::register_exception_translator(Translate); }

}  // namespace ballast
