// RETURN_IF_ERROR(expression) and ASSIGN_OR_RETURN(auto value, expression) over absl::Status and absl::StatusOr.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define BALLAST_CONCAT_INNER(a, b) a##b
#define BALLAST_CONCAT(a, b) BALLAST_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expression)                                     \
  do {                                                                  \
    if (absl::Status status_or_ok = (expression); !status_or_ok.ok()) { \
      return status_or_ok;                                              \
    }                                                                   \
  } while (false)

#define ASSIGN_OR_RETURN(declaration, expression) \
  ASSIGN_OR_RETURN_IMPL(BALLAST_CONCAT(status_or_, __LINE__), declaration, expression)
#define ASSIGN_OR_RETURN_IMPL(holder, declaration, expression) \
  auto holder = (expression);                                  \
  if (!holder.ok()) return std::move(holder).status();         \
  declaration = *std::move(holder)
