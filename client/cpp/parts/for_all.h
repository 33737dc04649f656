// The same call to each daemon of a run, side by side.
#pragma once

#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/rewound.h"

namespace ballast {

// call(part), once for each of so many parts, each on a thread of its own but the first; the answers by part.
template <typename Call>
auto ForAll(uint32_t parts, const Call& call) {
  using Answer = decltype(call(uint32_t{0}));
  std::vector<std::future<Answer>> others;
  for (uint32_t part = 1; part < parts; ++part) others.push_back(std::async(std::launch::async, call, part));
  std::vector<Answer> answers;
  answers.push_back(call(0));
  for (std::future<Answer>& other : others) answers.push_back(other.get());
  return answers;
}

// With the daemon's name in front, where more than one is asked; what says that the run was rewound stays as it is.
inline absl::Status NamedBy(const std::string& daemon, const absl::Status& status) {
  if (status.ok() || RewoundTo(status) || absl::StrContains(status.message(), daemon)) return status;
  absl::Status named(status.code(), absl::StrCat(daemon, ": ", std::string(status.message())));
  status.ForEachPayload([&](auto type, const auto& payload) { named.SetPayload(type, payload); });
  return named;
}

// All the answers, or the first error.
template <typename T>
absl::StatusOr<std::vector<T>> AllOrError(std::vector<absl::StatusOr<T>> answers,
                                          const std::vector<std::string>& names) {
  std::vector<T> all;
  for (size_t part = 0; part < answers.size(); ++part) {
    if (!answers[part].ok()) return NamedBy(names[part], answers[part].status());
    all.push_back(*std::move(answers[part]));
  }
  return all;
}

}  // namespace ballast
