// A function of a library that is loaded at run time, as a member of a table of them: the table has the `library` of dlopen, and
// `lacks`, the name of the first function that is not there, if any.
#pragma once

#include <dlfcn.h>

namespace ballast {

template <typename R, typename... Args>
struct LoadedFunction {
  template <class Table>
  LoadedFunction(Table* table, const char* called)
      : name(called), call(reinterpret_cast<R (*)(Args...)>(dlsym(table->library, called))) {
    if (call == nullptr && table->lacks == nullptr) table->lacks = name;
  }
  const char* const name;
  R (*const call)(Args...);  // nullptr: it is not there
};

}  // namespace ballast
