#include "client/python/core/live_instances.h"

#include <vector>

namespace ballast {

namespace nb = nanobind;

nb::list LiveInstances(nb::type_object kind) {
  auto* const type = reinterpret_cast<PyTypeObject*>(kind.ptr());
  const nb::object get_objects = nb::module_::import_("gc").attr("get_objects");
  std::vector<nb::object> found;  // a list's allocation may collect garbage, and run what that calls
  {
    const nb::object all = nb::steal(PyObject_CallNoArgs(get_objects.ptr()));
    if (!all.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PyList_GET_SIZE(all.ptr());
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const one = PyList_GET_ITEM(all.ptr(), i);
      if (PyObject_TypeCheck(one, type)) found.push_back(nb::borrow(one));
    }
  }
  nb::list result;
  for (const nb::object& one : found) result.append(one);
  return result;
}

}  // namespace ballast
