// What torch's C++ code asks of CUDA: which device is current, how many there are, whether there are any.
// A build of torch for CPUs has no answers of its own; these let autograd work on tensors that say "cuda".
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>

namespace {
using namespace c10;
// two, of which CUDA_VISIBLE_DEVICES may name fewer
const DeviceIndex num_devices = [] {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return 2;
  if (*visible == '\0') return 0;
  return std::strchr(visible, ',') == nullptr ? 1 : 2;
}();
thread_local DeviceIndex current = 0;  // as in CUDA, a new thread begins with device 0

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = device.has_index() ? device.index() : 0; }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  // one stream, whose work is done at once
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
const Guard guard;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return num_devices > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = current;
    current = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
  void deviceSynchronize(DeviceIndex) const override {}
};
}  // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}

extern "C" {
void fake_cuda_begin() { impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard); }
void fake_cuda_set_device(int index) { current = static_cast<DeviceIndex>(index); }
int fake_cuda_current_device() { return current; }
int fake_cuda_num_devices() { return num_devices; }
}
