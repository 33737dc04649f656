#include "server/ops/ops_page.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "ballast_page_charts_js.h"
#include "ballast_page_elements_js.h"
#include "ballast_page_format_js.h"
#include "ballast_page_heatmap_js.h"
#include "ballast_page_history_js.h"
#include "ballast_page_icon_svg.h"
#include "ballast_page_index_html.h"
#include "ballast_page_page_css.h"
#include "ballast_page_page_js.h"
#include "ballast_page_panels_js.h"

#include "server/ops/runbook.h"

namespace ballast {
namespace {

template <size_t kBytes>
std::string_view Text(const unsigned char (&bytes)[kBytes]) {
  return {reinterpret_cast<const char*>(bytes), kBytes};
}

constexpr std::string_view kScript = "text/javascript; charset=utf-8";

const auto& Files() {
  static const std::array files = {
      PageFile{"/", "text/html; charset=utf-8", Text(kPage_index_html)},
      PageFile{"/runbook", "text/html; charset=utf-8", RunbookPage()},
      PageFile{"/static/icon.svg", "image/svg+xml", Text(kPage_icon_svg)},
      PageFile{"/static/page.css", "text/css; charset=utf-8", Text(kPage_page_css)},
      PageFile{"/static/page.js", kScript, Text(kPage_page_js)},
      PageFile{"/static/panels.js", kScript, Text(kPage_panels_js)},
      PageFile{"/static/charts.js", kScript, Text(kPage_charts_js)},
      PageFile{"/static/heatmap.js", kScript, Text(kPage_heatmap_js)},
      PageFile{"/static/history.js", kScript, Text(kPage_history_js)},
      PageFile{"/static/elements.js", kScript, Text(kPage_elements_js)},
      PageFile{"/static/format.js", kScript, Text(kPage_format_js)},
  };
  return files;
}

}  // namespace

const PageFile* FindPageFile(std::string_view path) {
  const auto& files = Files();
  const auto found = std::find_if(files.begin(), files.end(), [&](const PageFile& file) { return file.path == path; });
  return found == files.end() ? nullptr : &*found;
}

}  // namespace ballast
