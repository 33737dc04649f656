#include "server/step_values.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ballast {
namespace {

double ValueAt(const std::string& content, size_t index) {
  double value = 0;
  std::memcpy(&value, content.data() + index * sizeof(value), sizeof(value));
  return value;
}

}  // namespace

std::string StepContent(double loss_scale, const std::vector<std::vector<double>>& hyper) {
  std::string content;
  const auto add = [&](double value) { content.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  add(loss_scale);
  for (const std::vector<double>& group : hyper) {
    for (const double value : group) add(value);
  }
  return content;
}

std::string DifferenceOf(const RunSpec& spec, const std::string& a, const std::string& b) {
  std::vector<std::string> names = {"loss_scale"};
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    for (const kernels::Hyper& h : spec.groups[g].kernel->hypers) {
      names.push_back(absl::StrCat("groups[", g, "].", h.name));
    }
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const double of_a = ValueAt(a, i), of_b = ValueAt(b, i);
    if (std::memcmp(&of_a, &of_b, sizeof(double)) == 0) continue;
    return absl::StrFormat("%s is %.17g and %.17g", names[i], of_a, of_b);
  }
  return "nothing differs";
}

}  // namespace ballast
