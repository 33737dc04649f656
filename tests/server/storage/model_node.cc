#include "tests/server/storage/model_node.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

uint64_t ModelChange::options() const {
  return bytes.empty() ? 2 : 2 + (offset + bytes.size() - 1) / kSector - offset / kSector;
}

ModelChange ModelChange::Torn(uint64_t chosen) const {
  ModelChange torn = *this;
  if (chosen + 1 < options()) torn.bytes.resize((offset / kSector + chosen) * kSector - offset);
  return torn;
}

void ModelNode::Apply(const ModelChange& change) {
  if (change.node != nullptr) {
    std::erase_if(names, [&](const auto& named) { return named.second == change.node; });
    if (!change.name.empty()) names[change.name] = change.node;
  } else if (change.size) {
    content.resize(*change.size, '\0');
  } else {
    content.resize(std::max<uint64_t>(content.size(), change.offset + change.bytes.size()), '\0');
    content.replace(change.offset, change.bytes.size(), change.bytes);
  }
}

void ModelNode::Add(ModelChange change) {
  Apply(change);
  changes.push_back(std::move(change));
}

void ModelNode::Sync() {
  bool all = true;
  for (ModelChange& change : changes) {
    if (change.state == ModelChange::State::kNew) change.state = ModelChange::State::kSynced;
    all = all && change.state == ModelChange::State::kSynced;
  }
  if (all) Keep();
}

void ModelNode::SyncFails() {
  for (ModelChange& change : changes) {
    if (change.state == ModelChange::State::kNew) change.state = ModelChange::State::kGivenUp;
  }
}

void ModelNode::Keep() {
  kept_content = content;
  kept_names = names;
  changes.clear();
}

bool ModelNode::KeepNamesTo(const ModelNode* of) {
  for (const auto& [name, child] : names) {
    if (child.get() != of && !(child->is_folder && child->KeepNamesTo(of))) continue;
    for (ModelChange& change : changes) {
      if (change.node == child) change.state = ModelChange::State::kSynced;
    }
    return true;
  }
  return false;
}

uint64_t ModelNode::Bytes() const {
  uint64_t sum = content.size();
  for (const auto& [_, child] : names) sum += child->Bytes();
  return sum;
}

void ModelNode::Dump(const std::string& path, std::string* to) const {
  for (const auto& [name, child] : names) {
    const std::string at = absl::StrCat(path, "/", name);
    absl::StrAppend(to, at, child->is_folder ? "/" : absl::StrCat(" ", child->content.size(), " bytes"), "\n");
    child->Dump(at, to);
  }
}

// A name that is taken now was free when the change was made: what freed it was lost. It cannot have been lost, since
// otherwise a file would be left with neither its old name nor its new one.
void ModelNode::ApplyName(const std::vector<ModelChange>& history, size_t index) {
  const ModelChange& change = history[index];
  const auto holder = names.find(change.name);
  if (holder != names.end() && holder->second != change.node) {
    const std::shared_ptr<ModelNode> node = holder->second;
    for (size_t before = index; before-- > 0;) {
      if (history[before].node != node) continue;
      ApplyName(history, before);
      break;
    }
  }
  Apply(change);
}

std::shared_ptr<ModelNode> ModelNode::AfterCut(Choose choose) const {
  auto left = std::make_shared<ModelNode>();
  left->is_folder = is_folder;
  left->content = kept_content;
  left->names = kept_names;
  for (size_t i = 0; i < changes.size(); ++i) {
    const ModelChange& change = changes[i];
    const uint64_t all = change.options() - 1;
    const uint64_t chosen = change.state == ModelChange::State::kSynced ? all : choose(change.options());
    if (chosen == 0) continue;
    is_folder ? left->ApplyName(changes, i) : left->Apply(change.Torn(chosen));
  }
  for (auto& [_, child] : left->names) child = child->AfterCut(choose);
  left->Keep();
  return left;
}

}  // namespace ballast
