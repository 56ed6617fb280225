// A pretended CUDA backend for CPU builds of PyTorch. Memory is the host's and kernels are the CPU's, but tensors say that they are on
// "cuda:0" or "cuda:1", and mixing devices is refused as CUDA's wrappers refuse it. `backend.py` compiles it and loads it.
//
// It registers what PyTorch asks of a backend: a device guard, hooks (pinned memory, generators), an allocator, and one boxed fallback
// under the dispatch key CUDA, which checks devices and then runs the CPU's kernel on tensors over the same memory.
// It cannot see streams, races, NCCL, the choice of an attention kernel, rounding on the card, fragmentation and speed.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::kCPU;
using c10::kCUDA;
using c10::Stream;

constexpr DeviceIndex CARDS = 2;
thread_local DeviceIndex current = 0;

// Every operation ends before the next one begins, so streams and events have nothing to do.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before(kCUDA, current);
    uncheckedSetDevice(device);
    return before;
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kCUDA, device.index() < 0 ? current : device.index()));
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return CARDS; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

std::mutex lock;
std::unordered_map<void*, int64_t> sizes;
std::set<void*> pinned;
int64_t live = 0, peak = 0;  // bytes, over both cards

void release(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto found = sizes.find(pointer);
  if (found != sizes.end()) {
    live -= found->second;
    sizes.erase(found);
  }
  std::free(pointer);
}

struct CardMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    if (bytes) {
      size_t rounded = (bytes + 511) / 512 * 512;  // as the CUDA caching allocator rounds
      TORCH_CHECK(posix_memalign(&pointer, 512, rounded) == 0, "The host has no memory left.");
      std::memset(pointer, 0x7f, rounded);  // not zero: reading before writing must show
      std::lock_guard<std::mutex> held(lock);
      sizes[pointer] = (int64_t)rounded;
      live += (int64_t)rounded;
      peak = std::max(peak, live);
    }
    return {pointer, pointer, &release, Device(kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
CardMemory card_memory;

void unpin(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  pinned.erase(pointer);
  std::free(pointer);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 64, bytes ? bytes : 64) == 0, "The host has no memory left.");
    std::lock_guard<std::mutex> held(lock);
    pinned.insert(pointer);
    return {pointer, pointer, &unpin, Device(kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

struct CardGenerator final : at::CPUGeneratorImpl {  // the CPU's numbers under CUDA's name
  CardGenerator(DeviceIndex index) : at::CPUGeneratorImpl(0) {
    device_ = Device(kCUDA, index);
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
};
}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // PyTorch looks for a class of this name, when it is asked for CUDA the first time
  CUDAHooks(CUDAHooksArgs = {}) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return CARDS; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> held(lock);
    return pinned.count(const_cast<void*>(pointer)) > 0;
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &card_memory; }
  Generator getNewGenerator(DeviceIndex index) const override { return make_generator<CardGenerator>(index < 0 ? current : index); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    static Generator all[CARDS] = {make_generator<CardGenerator>(0), make_generator<CardGenerator>(1)};
    return all[index < 0 ? current : index];
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace {
using at::Tensor;

Tensor host_view(const Tensor& tensor) {  // a CPU tensor over the same memory
  auto storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), Device(kCPU));
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(host), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

void shape_like(const Tensor& tensor, const Tensor& like) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
}

Tensor card_view(const Tensor& base, const Tensor& like) {  // a view of an inference tensor is one as well: the keys of its base
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  shape_like(view, like);
  return view;
}

Tensor card_copy(const Tensor& host) {
  auto storage = host.storage();
  auto data = card_memory.allocate(storage.nbytes());
  if (storage.nbytes()) std::memcpy(data.get(), storage.data(), storage.nbytes());
  c10::Storage own(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), &card_memory, true);
  auto copy = at::detail::make_tensor<c10::TensorImpl>(std::move(own), DispatchKeySet(DispatchKey::CUDA), host.dtype());
  shape_like(copy, host);
  return copy;
}

at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype()));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(kCUDA, current)));
  return at::detail::empty_generic(size, &card_memory, DispatchKeySet(DispatchKey::CUDA), or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kCUDA, current)));
  return at::detail::empty_strided_generic(size, stride, &card_memory, DispatchKeySet(DispatchKey::CUDA), or_default(dtype));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool) {
  if (to.is_same(from)) return to;
  for (const Tensor& each : {to, from}) TORCH_CHECK(each.is_cuda() || each.is_cpu(), "There is no copy to or from ", each.device());
  auto host_to = to.is_cuda() ? host_view(to) : to;
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  host_to.copy_(from.is_cuda() ? host_view(from) : from);
  return to;
}

const Tensor& resize_(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t wanted = (c10::multiply_integers(size) + tensor.storage_offset()) * tensor.itemsize();
  if (tensor.storage().nbytes() < wanted) at::native::resize_bytes_nocuda(tensor.storage(), wanted);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

bool holds_tensor(c10::ArrayRef<c10::IValue> list) {
  return std::any_of(list.begin(), list.end(), [](const c10::IValue& each) { return each.isTensor(); });
}

// Applies `change` to each tensor among `count` values of the stack that begin at `first`, in lists too.
template <class Change>
void change_tensors(torch::jit::Stack* stack, size_t first, size_t count, Change change) {
  for (size_t i = first; i < first + count; i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = change(value.toTensor(), i - first);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(change(each, i - first));
      value = list;
    } else if (value.isList() && holds_tensor(value.toListRef())) {
      c10::List<std::optional<Tensor>> list;
      for (const c10::IValue& each : value.toListRef())
        list.push_back(each.isTensor() ? std::optional<Tensor>(change(each.toTensor(), i - first)) : std::nullopt);
      value = list;
    }
  }
}

// CUDA's kernels take indices that are on the host; every other operator takes only single numbers from there.
const std::set<std::string> TAKE_HOST_INDICES = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_",
                                                 "aten::_index_put_impl_", "aten::_unsafe_index.Tensor"};

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  const size_t count = schema.arguments().size(), first = stack->size() - count;

  std::optional<Device> device, asked;
  std::string on_host;
  change_tensors(stack, first, count, [&](const Tensor& tensor, size_t place) {
    const std::string& argument = schema.arguments()[place].name();
    if (tensor.defined() && tensor.is_cuda()) {
      TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  *device, " and ", tensor.device(), "! (", name, ")");
      device = tensor.device();
    } else if (tensor.defined() && (tensor.dim() || argument == "out")) {
      on_host = argument;
    }
    return tensor;
  });
  TORCH_CHECK(!device || on_host.empty() || TAKE_HOST_INDICES.count(name), "Expected all tensors to be on the same device, but found at ",
              "least two devices, ", device.value_or(Device(kCPU)), " and cpu! (argument ", on_host, " of ", name, ")");
  for (size_t i = first; i < first + count; i++) {
    auto& value = (*stack)[i];
    if (value.isDevice()) {
      asked = value.toDevice();
      value = Device(kCPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu' (", name, ")");
      static at::Generator host = at::make_generator<at::CPUGeneratorImpl>(7);
      value = host;
    }
  }

  c10::DeviceGuard guard(device.value_or(asked.value_or(Device(kCUDA, current))));
  std::vector<std::pair<Tensor, Tensor>> pairs;  // a tensor on the card, and its view on the host
  change_tensors(stack, first, count, [&](const Tensor& tensor, size_t) -> Tensor {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& pair : pairs)
      if (pair.first.is_same(tensor)) return pair.second;
    pairs.emplace_back(tensor, host_view(tensor));
    return pairs.back().second;
  });
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  if (name.rfind("aten::_softmax", 0) == 0 || name.rfind("aten::_log_softmax", 0) == 0) {  // 16 bits in, float32 out: not on the CPU
    auto& half_to_float = (*stack)[first + 2];
    if (half_to_float.isBool() && half_to_float.toBool()) {
      (*stack)[first] = (*stack)[first].toTensor().to(at::kFloat);
      half_to_float = false;
    }
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);

  for (auto& [card, host] : pairs) {  // out= of another size was resized on the host
    if (host.storage().data() == card.storage().data() && host.sizes() == card.sizes()) continue;
    auto made = card_copy(host);
    card.storage().set_nbytes(made.storage().nbytes());
    card.storage().set_data_ptr_noswap(std::move(made.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
    shape_like(card, host);
  }
  const size_t results = schema.returns().size();
  change_tensors(stack, stack->size() - results, results, [&](const Tensor& tensor, size_t) -> Tensor {
    if (!tensor.defined()) return tensor;
    for (auto& [card, host] : pairs)
      if (host.is_same(tensor)) return card;
    for (auto& [card, host] : pairs)
      if (tensor.storage().data() && tensor.storage().data() == host.storage().data()) return card_view(card, tensor);
    return card_copy(tensor);
  });
}
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("resize_", &resize_);
}

extern "C" {  // for ctypes
void pretended_cuda_start() { c10::SetAllocator(kCUDA, &card_memory, 9); }
int64_t pretended_cuda_live() { return live; }
int64_t pretended_cuda_peak() { return peak; }
void pretended_cuda_reset_peak() { peak = live; }
int64_t pretended_cuda_device() { return current; }
void pretended_cuda_set_device(int64_t index) { current = (DeviceIndex)index; }
void pretended_cuda_resize(void* storage, int64_t bytes) {  // storage: `UntypedStorage._cdata`
  auto* own = static_cast<c10::StorageImpl*>(storage);
  auto made = card_memory.allocate((size_t)bytes);
  size_t kept = std::min((size_t)bytes, own->nbytes());
  if (kept) std::memcpy(made.get(), own->data(), kept);
  own->set_data_ptr_noswap(std::move(made));
  own->set_nbytes((size_t)bytes);
}
}
