// What to do about each alert, for a browser: the runbook of deploy/README.md, compiled in. Each alert's section has its
// name in lower case as its anchor, as in that file.
#pragma once

#include <string>
#include <string_view>

namespace ballast {

// HTML; constant and thread-safe.
std::string_view RunbookPage();

// The part of the document from its heading "# Runbook" on, as HTML. Text is shown as it is written.
std::string RunbookHtml(std::string_view document);

}  // namespace ballast
