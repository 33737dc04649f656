#include "server/ops/runbook.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ballast_runbook.h"

namespace ballast {
namespace {

constexpr absl::string_view kHead =
    "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Ballast: runbook</title>\n"
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
    "<link rel=\"stylesheet\" href=\"/static/page.css\"></head><body class=\"runbook\"><h1>Runbook</h1><pre>\n";
constexpr std::string_view kBegin = "\n# Runbook\n";

}  // namespace

std::string RunbookHtml(std::string_view document) {
  const size_t begin = document.find(kBegin);
  std::string html(kHead);
  if (begin != std::string_view::npos) document.remove_prefix(begin + kBegin.size());
  const std::string text = absl::StrReplaceAll(std::string(document), {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::ConsumePrefix(&line, "## ")) {
      absl::StrAppend(&html, "</pre><h2 id=\"", absl::AsciiStrToLower(line), "\">", line, "</h2><pre>\n");
    } else {
      absl::StrAppend(&html, line, "\n");
    }
  }
  return absl::StrCat(html, "</pre></body></html>\n");
}

std::string_view RunbookPage() {
  static const std::string page = RunbookHtml({reinterpret_cast<const char*>(kRunbook), sizeof kRunbook});
  return page;
}

}  // namespace ballast
