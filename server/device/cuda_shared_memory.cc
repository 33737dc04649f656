#include "server/device/cuda_shared_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr unsigned kSince = 11020;  // the functions as that version of CUDA has them

// The driver's functions, which the runtime finds: nothing is linked against a driver.
struct DriverCalls {
  decltype(&::cuGetErrorString) error_string = nullptr;
  decltype(&::cuDeviceGet) device_get = nullptr;
  decltype(&::cuDeviceGetAttribute) attribute = nullptr;
  decltype(&::cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&::cuMemCreate) create = nullptr;
  decltype(&::cuMemRelease) release = nullptr;
  decltype(&::cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&::cuMemAddressReserve) reserve = nullptr;
  decltype(&::cuMemAddressFree) free_address = nullptr;
  decltype(&::cuMemMap) map = nullptr;
  decltype(&::cuMemUnmap) unmap = nullptr;
  decltype(&::cuMemSetAccess) set_access = nullptr;
  const char* missing = nullptr;  // the first that the driver does not have
};

template <class Function>
void Find(const char* name, Function* function, const char** missing) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, kSince, cudaEnableDefault, &result);
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess && found != nullptr) {
    *function = reinterpret_cast<Function>(found);
  } else if (*missing == nullptr) {
    *missing = name;
  }
}

DriverCalls FindCalls() {
  DriverCalls calls;
  const char** const missing = &calls.missing;
  Find("cuGetErrorString", &calls.error_string, missing);
  Find("cuDeviceGet", &calls.device_get, missing);
  Find("cuDeviceGetAttribute", &calls.attribute, missing);
  Find("cuMemGetAllocationGranularity", &calls.granularity, missing);
  Find("cuMemCreate", &calls.create, missing);
  Find("cuMemRelease", &calls.release, missing);
  Find("cuMemExportToShareableHandle", &calls.export_handle, missing);
  Find("cuMemAddressReserve", &calls.reserve, missing);
  Find("cuMemAddressFree", &calls.free_address, missing);
  Find("cuMemMap", &calls.map, missing);
  Find("cuMemUnmap", &calls.unmap, missing);
  Find("cuMemSetAccess", &calls.set_access, missing);
  cudaGetLastError();  // what is not found is no failure of the device
  return calls;
}

const DriverCalls& Calls() {
  static const DriverCalls calls = FindCalls();
  return calls;
}

absl::Status Check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  Calls().error_string(result, &text);
  const std::string said =
      absl::StrCat(call, ": ", text != nullptr ? text : "an error without a name", " (", result, ")");
  return result == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(said) : absl::FailedPreconditionError(said);
}

absl::Status CheckAttribute(CUdevice device, CUdevice_attribute attribute, const char* what) {
  int has = 0;
  RETURN_IF_ERROR(Check(Calls().attribute(&has, attribute, device), "cuDeviceGetAttribute"));
  if (has != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the GPU or its driver has no ", what));
}

CUmemAllocationProp PropertiesOf(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// The memory at an address of its own, for this device to use. It stays as long as it is mapped, though the handle goes.
absl::StatusOr<std::byte*> Map(CUmemGenericAllocationHandle memory, int device, uint64_t bytes) {
  CUdeviceptr at = 0;
  RETURN_IF_ERROR(Check(Calls().reserve(&at, bytes, 0, 0, 0), "cuMemAddressReserve"));
  absl::Cleanup give_back = [at, bytes] { Calls().free_address(at, bytes); };
  RETURN_IF_ERROR(Check(Calls().map(at, bytes, 0, memory, 0), "cuMemMap"));
  absl::Cleanup unmap = [at, bytes] { Calls().unmap(at, bytes); };
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  RETURN_IF_ERROR(Check(Calls().set_access(at, bytes, &access, 1), "cuMemSetAccess"));
  std::move(unmap).Cancel();
  std::move(give_back).Cancel();
  return reinterpret_cast<std::byte*>(at);
}

}  // namespace

absl::StatusOr<GpuDriver::Shared> AllocateSharedMemory(int device, uint64_t bytes) {
  const DriverCalls& calls = Calls();
  if (calls.missing != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("the CUDA driver has no ", calls.missing, ": it is older than 11.2"));
  }
  CUdevice gpu = 0;
  RETURN_IF_ERROR(Check(calls.device_get(&gpu, device), "cuDeviceGet"));
  RETURN_IF_ERROR(
      CheckAttribute(gpu, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"));
  RETURN_IF_ERROR(CheckAttribute(gpu, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                 "memory that is exported to a file descriptor"));
  const CUmemAllocationProp properties = PropertiesOf(device);
  size_t unit = 0;
  RETURN_IF_ERROR(
      Check(calls.granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "cuMemGetAllocationGranularity"));
  bytes = (bytes + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle memory = 0;
  RETURN_IF_ERROR(Check(calls.create(&memory, bytes, &properties, 0), "cuMemCreate"));
  const absl::Cleanup release = [memory] { Calls().release(memory); };
  int fd = -1;
  RETURN_IF_ERROR(Check(calls.export_handle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                        "cuMemExportToShareableHandle"));
  absl::Cleanup close_fd = [fd] { close(fd); };
  ASSIGN_OR_RETURN(std::byte* const data, Map(memory, device, bytes));
  std::move(close_fd).Cancel();
  return GpuDriver::Shared{.data = data, .bytes = bytes, .fd = fd};
}

void FreeSharedMemory(const GpuDriver::Shared& shared) {
  const auto at = reinterpret_cast<CUdeviceptr>(shared.data);
  Calls().unmap(at, shared.bytes);
  Calls().free_address(at, shared.bytes);
  close(shared.fd);
}

}  // namespace ballast
