#include "client/cpp/ctl/step_text.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

#include "client/cpp/ctl/run_text.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

std::vector<std::pair<std::string, double>> Parts(const v1::StepRecord& step) {
  return {{"gradients under way", step.receive_seconds()},
          {absl::StrCat("all others wait for rank ", step.last_rank()), step.wait_seconds()},
          {"updates", step.update_seconds()}};
}

std::string KindName(v1::SpikeKind kind) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::SpikeKind_Name(kind), "SPIKE_KIND_"));
}

std::string Kinds(const v1::StepRecord& step, absl::string_view between) {
  return absl::StrJoin(step.spikes(), between, [](std::string* out, const v1::SpikeEvent& event) {
    absl::StrAppend(out, KindName(event.kind()), event.layer().empty() ? "" : " ", event.layer());
  });
}

// "-": there is none.
std::string LargestRms(const v1::StepRecord& step) {
  float largest = -1;
  for (const float rms : step.layer_rms()) largest = std::max(largest, std::isfinite(rms) ? rms : -1);
  return largest < 0 ? "-" : Number(largest);
}

std::string Exact(double value) { return absl::StrFormat("%.9g", value); }
// A cell; of a row, and of one line, whatever a layer is called.
std::string Quoted(absl::string_view name) {
  std::string text = Visible(name);
  if (text.find_first_of(",\"") == std::string::npos) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

}  // namespace

std::string Slowest(const v1::StepRecord& step) {
  const auto parts = Parts(step);
  return std::max_element(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

void PrintParts(const v1::StepRecord& step, std::ostream& out) {
  Table table({Table::kLeft, Table::kRight});
  for (const auto& [name, seconds] : Parts(step)) table.Row({absl::StrCat("  ", name), Duration(seconds)});
  table.Print(out);
}

std::string WatchHead() {
  return absl::StrFormat("%10s  %-8s  %10s  %10s  %8s  %8s  %s", "STEP", "OUTCOME", "LOSS", "NORM", "RMS", "TOOK",
                         "FOUND");
}

std::string WatchLine(const v1::StepRecord& step) {
  std::string found = Kinds(step, ", ");
  if (!step.reason().empty()) found = absl::StrCat(step.reason(), found.empty() ? "" : "; ", found);
  std::string line = absl::StrFormat("%10d  %-8s  %10s  %10s  %8s  %8s  %s", step.step(), OutcomeName(step.outcome()),
                                     step.has_loss() ? Number(step.loss()) : "-", Number(step.grad_norm()),
                                     LargestRms(step), Duration(step.seconds()), found);
  absl::StripTrailingAsciiWhitespace(&line);
  return Visible(line);
}

void PrintCsv(const v1::GetHistoryResponse& history, std::ostream& out) {
  out << "step,outcome,reason,closed_at_s,loss,learning_rate,grad_norm,clip_coefficient,edq_ratio,unchanged_ratio,"
         "seconds,receive_seconds,update_seconds,wait_seconds,last_rank,received_bytes,sent_bytes,spikes";
  for (const std::string& layer : history.layers()) out << "," << Quoted(absl::StrCat("rms ", layer));
  out << "\n";
  for (const v1::StepRecord& s : history.steps()) {
    std::vector<std::string> cells = {absl::StrCat(s.step()),
                                      OutcomeName(s.outcome()),
                                      Quoted(s.reason()),
                                      absl::StrFormat("%.6f", s.closed_at_s()),
                                      s.has_loss() ? Exact(s.loss()) : "",
                                      Exact(s.learning_rate()),
                                      Exact(s.grad_norm()),
                                      Exact(s.clip_coefficient()),
                                      s.has_edq_ratio() ? Exact(s.edq_ratio()) : "",
                                      s.has_unchanged_ratio() ? Exact(s.unchanged_ratio()) : "",
                                      Exact(s.seconds()),
                                      Exact(s.receive_seconds()),
                                      Exact(s.update_seconds()),
                                      Exact(s.wait_seconds()),
                                      absl::StrCat(s.last_rank()),
                                      absl::StrCat(s.received_bytes()),
                                      absl::StrCat(s.sent_bytes()),
                                      Quoted(Kinds(s, "; "))};
    for (const float rms : s.layer_rms()) cells.push_back(std::isfinite(rms) ? Exact(rms) : "");
    out << absl::StrJoin(cells, ",") << "\n";
  }
}

}  // namespace ballast::ctl
