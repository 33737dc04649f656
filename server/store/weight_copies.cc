#include "server/store/weight_copies.h"

#include <utility>

namespace ballast {

void WeightCopies::Ask(const void* asker, uint32_t tensor, Done done) {
  askers_.push_back({asker, tensor, std::move(done)});
  if (!taken_) MakeNext();
}

void WeightCopies::Withdraw(const void* asker) {
  std::erase_if(askers_, [asker](const Asker& a) { return a.id == asker; });
}

void WeightCopies::GiveBack() {
  if (saving_) {
    returned_ = true;
    return;
  }
  Free();
}

void WeightCopies::OnSaved() {
  saving_ = false;
  if (std::exchange(returned_, false)) Free();
}

void WeightCopies::Free() {
  copy_.reset();
  taken_ = false;
  if (!askers_.empty()) MakeNext();
}

void WeightCopies::MakeNext() {
  Asker asker = std::move(askers_.front());
  askers_.pop_front();
  taken_ = true;
  auto image = store_->NewImage(asker.tensor);
  if (!image.ok()) return asker.done(image.status());
  copy_ = *std::move(image);
  saving_ = true;
  store_->Save(asker.tensor, &*copy_, [this](const TaskResult&) { OnSaved(); });
  asker.done(&*copy_);
}

}  // namespace ballast
