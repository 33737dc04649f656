// The live page's files, compiled in from server/ops/page/. Constant; thread-safe.
#pragma once

#include <string_view>

namespace ballast {

struct PageFile {
  std::string_view path;  // of the URL
  std::string_view content_type;
  std::string_view body;
};

// nullptr: there is none.
const PageFile* FindPageFile(std::string_view path);

}  // namespace ballast
