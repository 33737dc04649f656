#include "server/spec/layers.h"

#include <algorithm>
#include <unordered_map>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

#include "server/base/utf8.h"

namespace ballast {
namespace {

constexpr size_t kMaxLabelBytes = 128;
constexpr char kOther[] = "other";

// The name up to its first dotted part that ends in a number; empty: there is none. "fc1.weight" -> "fc1", while
// "conv2d.weight" has no number in this sense.
absl::string_view UpToNumber(absl::string_view name) {
  for (size_t end = 0; end < name.size();) {
    end = std::min(name.find('.', end), name.size());
    if (end > 0 && absl::ascii_isdigit(static_cast<unsigned char>(name[end - 1]))) return name.substr(0, end);
    ++end;
  }
  return "";
}

// What the parts outside the numbered layers are for: "model.embed_tokens" -> embed, "lm_head" -> head,
// "final_layernorm" -> norm. Whole words, so that "multihead_attn" is no head. Empty: none of these.
std::string RoleOf(absl::string_view name) {
  const std::string lower = absl::AsciiStrToLower(name);
  const std::vector<absl::string_view> words = absl::StrSplit(lower, absl::ByAnyChar("._"));
  const auto any = [&](auto matches) { return std::any_of(words.begin(), words.end(), matches); };
  if (any([](absl::string_view w) { return absl::StartsWith(w, "embed") || w == "wte" || w == "wpe"; })) return "embed";
  if (any([](absl::string_view w) { return w == "head"; })) return "head";
  if (any([](absl::string_view w) { return absl::EndsWith(w, "norm") || w == "ln"; })) return "norm";
  return "";
}

std::string GroupName(absl::string_view tensor) {
  std::string name(UpToNumber(tensor));
  if (name.empty()) name = RoleOf(tensor);
  if (name.empty()) name = std::string(tensor.substr(0, tensor.find('.')));
  name = ValidUtf8(name, kMaxLabelBytes);
  return name.empty() ? kOther : name;
}

}  // namespace

LayerGroups::LayerGroups(const std::vector<std::string>& tensor_names, uint32_t max_groups) {
  const size_t most = std::max<size_t>(max_groups, 1);
  std::unordered_map<std::string, uint32_t> index;
  group_.reserve(tensor_names.size());
  for (const std::string& tensor : tensor_names) {
    auto [found, added] = index.try_emplace(GroupName(tensor), static_cast<uint32_t>(names_.size()));
    if (added) names_.push_back(found->first);
    group_.push_back(found->second);
  }
  if (names_.size() <= most) return;
  overflowed_ = true;
  names_.resize(most - 1);
  const auto other = static_cast<uint32_t>(std::find(names_.begin(), names_.end(), kOther) - names_.begin());
  if (other == names_.size()) names_.push_back(kOther);
  for (uint32_t& group : group_) group = group < most - 1 ? group : other;
}

}  // namespace ballast
