#include "proto/tls/token_file.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "proto/tls/certificate_files.h"

namespace ballast {

absl::StatusOr<std::string> ReadToken(const std::string& file) {
  constexpr size_t kLeast = 16, kMost = 4096;
  absl::StatusOr<std::string> text = ReadSecretFile(file);
  if (!text.ok()) return text;
  absl::StripAsciiWhitespace(&*text);
  const bool visible = std::all_of(text->begin(), text->end(), [](unsigned char c) { return absl::ascii_isgraph(c); });
  if (visible && text->size() >= kLeast && text->size() <= kMost) return text;
  return absl::FailedPreconditionError(absl::StrCat(file, ": holds no token: one word of ", kLeast, " to ", kMost,
                                                    " visible characters; make one with openssl rand -hex 32"));
}

}  // namespace ballast
